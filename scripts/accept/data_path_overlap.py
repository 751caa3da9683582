"""Overlap of communication and computing, and where a round's time goes."""
import json
import os
import re
import subprocess

from cluster import BIN, Cluster, Failed
from runner import program

NEEDS_SHARED = False


def bench(*args):
    # A quiet machine is asked for: other programs get what is left.
    command = ["nice", "-n", "-20"] if os.geteuid() == 0 else []
    done = subprocess.run(command + [os.path.join(BIN, "bench_round"), "--json", *args], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, timeout=1800)
    if done.returncode:
        raise Failed("bench_round: exit %d: %s" % (done.returncode, done.stderr[-2000:]))
    return json.loads(done.stdout)


def part_overlap(report, folder, quick):
    tests = ["round_clock_test", "round_times_test", "job_times_test", "round_core_test", "round_core_random_test"]
    for name in tests:
        done = program(os.path.join(BIN, name))
        report.check("overlap: " + name, "passes", "exit %d" % done.returncode, done.returncode == 0)
    exposed_rows(report, quick)
    round_rows(report, quick)
    status_rows(report, folder)


# Of a round's wall time, 2 workers and 2 servers, one decision a round.
EXPOSED = (("tcp", "TCP", .12), ("shared_memory", "shared memory", .07))


def exposed_rows(report, quick):
    result = bench("--gpt", *(["--shapes=2x2", "--repeats=1", "--rounds=8"] if quick else ["--repeats=4", "--rounds=20"]))
    for row in result["rows"]:
        noisy = (row["alone_s_q3"] - row["alone_s_q1"]) / row["alone_s"] > .1
        for key, name, limit in EXPOSED:
            for discipline in ("VERDICT", "STREAM"):
                r = row[key][discipline]
                job = "small GPT, %d workers, %d servers, %s, %s: " % (row["workers"], row["servers"], discipline, name)
                what = job + "exposed communication, wall"
                measured = "%.1f%% (%.1f ms of %.1f ms; cut out %.1f ms)" % (
                    100 * r["exposed"], 1e3 * (r["round_s"] - row["alone_s"]), 1e3 * r["round_s"], 1e3 * row["alone_s"])
                if discipline == "VERDICT" and row["workers"] == 2:
                    # With fewer cores than processes nothing hides what communication costs in CPU time: --quick, which is to find
                    # what has become worse, does not count that.
                    crowded = quick and (os.cpu_count() or 1) < row["workers"] + row["servers"]
                    good = r["exposed"] <= ((max(limit, r["cpu_share"]) if crowded else limit) / .7 if quick else limit)
                    report.add(what, "<= %.0f%%" % (100 * limit), measured, "ok" if good else "NOISY" if noisy else "SHORT")
                else:
                    report.shown(what, measured)
                report.shown(job + "CPU ms a round, workers + servers (cut out)", "%.1f + %.1f (%.1f): %.1f%% are communication" % (
                    1e3 * r["worker_cpu_s"], 1e3 * r["server_cpu_s"], 1e3 * row["alone_cpu_s"], 100 * r["cpu_share"]))
                report.shown(job + "exposed communication and verdict, workers' clocks", "%.1f%%" % (100 * r["clocks_exposed"]))
                report.check(job + "the clocks' parts add up to the round", "95% to 105%", "%.1f%%" % (100 * r["clocks_add_up_to"]),
                             .95 <= r["clocks_add_up_to"] <= 1.05)


def round_rows(report, quick):
    args = ["--mparameters=1,4", "--rounds=8"] if quick else ["--mparameters=1,4,16,64,100", "--rounds=20"]
    for row in bench(*args)["rows"]:
        report.shown("round of %.1f M parameters, %dx%d, %s" % (row["parameters"] / 1e6, row["workers"], row["servers"],
                                                               row["discipline"]),
                     "%.1f ms (%.1f-%.1f), %.2f GB/s a worker, CPU %.1f + %.1f ms" % (
                         1e3 * row["round_s"], 1e3 * row["round_s_q1"], 1e3 * row["round_s_q3"], row["gb_per_s"],
                         1e3 * row["worker_cpu_s"], 1e3 * row["server_cpu_s"]))


def status_rows(report, folder):
    """The daemons' own account: history and status of a job."""
    rows = os.path.join(folder, "overlap-rows.jsonl")
    with open(rows, "w") as f:
        for i in range(64):
            f.write(json.dumps([(i * 7 + j * j) % 64 for j in range(32)]) + "\n")
    spec = {
        "name": "overlap",
        "model": {"gpt2": {"layers": 2, "heads": 4, "width": 128, "context": 32, "vocabulary": 64}},
        "data": {"rows": {"path": rows}, "validation_fraction": 0},
        "train": {"rounds": 60, "batch": 16, "eval_every": 60},
        "optimizer": {"adamw": {"learning_rate": 1e-3}, "clip_norm": 1.0},
        "parallel": {"data": 2},
    }
    with Cluster(servers=2, workers=2) as c:
        job, _ = c.run(spec)
        records = [r for r in c.history(job)["records"] if not r.get("evaluation") and int(r.get("round", 0)) >= 3]  # workers begin apart
        wall = sum(r.get("seconds", 0) for r in records)
        for replica in range(2):
            parts = [t for r in records for t in r["times"] if t.get("contributor", 0) == replica]
            total = sum(t.get(k, 0) for t in parts for k in ("compute", "exposed", "others", "verdict"))
            report.check("processes: replica %d's times add up to the rounds' wall time" % replica, "95% to 105%",
                         "%.1f%%" % (100 * total / wall), .95 <= total / wall <= 1.05)
        text = c.sluice("status", job).stdout
    line = re.search(r"round time\s+(.*)", text)
    report.check("sluice status says where a round's time goes", "a line", line.group(1) if line else "none", bool(line))
