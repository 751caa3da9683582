"""What a pipeline gains over stages that work one after the other, and its bubble."""
import json
import os
import statistics

from cluster import Cluster

NEEDS_SHARED = False

MICROBATCHES, STAGES = 8, 2


def small_gpt(folder, **parallel):
    """3.3 M parameters; 8 rows of 128 tokens a replica."""
    rows = os.path.join(folder, "small-gpt-rows.jsonl")
    if not os.path.exists(rows):
        with open(rows, "w") as f:
            for i in range(64):
                f.write(json.dumps([(i * 7 + j * j * (i + 3)) % 256 for j in range(129)]) + "\n")
    return {"name": "small-gpt", "model": {"gpt2": {"layers": 4, "heads": 8, "width": 256, "context": 128, "vocabulary": 256}},
            "data": {"rows": {"path": rows}, "validation_fraction": 0},
            "train": {"rounds": 24, "batch": 8 * parallel.get("data", 1), "eval_every": 0},
            "optimizer": {"adamw": {"learning_rate": 1e-3}, "clip_norm": 1.0},
            "checkpoint": {"every_rounds": 0}, "parallel": parallel}


def rounds_of(c, spec):
    job, _ = c.run(spec)
    records = [r for r in c.history(job)["records"] if not r.get("evaluation") and int(r.get("round", 0)) >= 4]
    times = [t for r in records for t in r["times"]]
    pipeline, compute = (sum(t.get(k, 0) for t in times) for k in ("pipeline", "compute"))
    return statistics.median(r["seconds"] for r in records), pipeline / (pipeline + compute)


def part_pipeline(report, folder, quick):
    found = {"ONE_F_ONE_B": [], "SEQUENTIAL": []}
    with Cluster(servers=1, workers=STAGES) as c:
        for _ in range(2 if quick else 5):
            for schedule in found:
                found[schedule].append(rounds_of(c, small_gpt(folder, pipeline=STAGES, microbatches=MICROBATCHES, schedule=schedule)))
    ratios = [s[0] / p[0] for p, s in zip(found["ONE_F_ONE_B"], found["SEQUENTIAL"])]
    for schedule, runs in found.items():
        report.shown("small GPT (1,1,2), 8 microbatches, %s: round" % schedule,
                     "%.1f ms" % (1e3 * statistics.median(r[0] for r in runs)))
    name = "small GPT (1,1,2), 8 microbatches, one thread a worker: "
    report.fast(name + "time of SEQUENTIAL / of ONE_F_ONE_B", 1.4, statistics.median(ratios))
    bubble = statistics.median(r[1] for r in found["ONE_F_ONE_B"])
    ideal = (STAGES - 1) / (MICROBATCHES + STAGES - 1)
    limit = .06 if not quick else .12  # a loaded machine makes stages unequal
    report.check(name + "bubble", "%.3f to %.3f" % (ideal - limit, ideal + limit), "%.3f" % bubble, abs(bubble - ideal) <= limit)
    report.shown(name + "bubble of SEQUENTIAL (ideal 0.5)", "%.3f" % statistics.median(r[1] for r in found["SEQUENTIAL"]))
