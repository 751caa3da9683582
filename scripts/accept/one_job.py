"""The numbers of one job through every daemon. Called by scripts/accept.sh."""
import glob
import json
import os
import random
import shutil
import subprocess
import sys
import time

import numpy as np

import tensors
from cluster import BIN, Cluster
from data_path_push_pull import bench
from golden import Golden, check_job, golden_rows
from nano import nano_spec
from runner import DATA, OPENMP_BLAS, PYTHON, SHARED, program, rows_of, run_parts


# ------------------------------------------------------------------------------------------------------ golden
def part_golden(report, folder):
    kept = os.path.join(folder, "in-process")
    done = program(os.path.join(BIN, "golden_test"), env=dict(os.environ, SLUICE_GOLDEN_EXPORT=kept))
    golden_rows(report, "golden matrix (golden_test)", done)
    golden = Golden(os.path.join(folder, "golden"))
    runs = [("sgd", 1, 1, 0), ("momentum", 2, 2, 4096), ("adamw", 3, 4, 997), ("adamw_clip", 2, 2, 997)]
    for case, servers, workers, chunk in runs:
        name = "processes %s, %d servers, %d workers" % (case, servers, workers)
        with Cluster(servers=servers, workers=workers) as c:
            job, _ = c.run(golden.spec(case, workers, chunk))
            weights = check_job(report, name, c, golden, case, job)
        want = tensors.digest(os.path.join(kept, "%s_%d" % (case, workers), "model.safetensors"))
        report.check(name + ": hash equals in-process", want, tensors.digest(weights), want == tensors.digest(weights))


def part_resume(report, folder, quick):
    golden = Golden(os.path.join(folder, "resume"))
    with Cluster(servers=2, workers=2) as c:
        job, _ = c.run(golden.spec("adamw_clip", 2))
        want = tensors.digest(golden.export(c, job))
        base = os.path.join(c.folder, "checkpoints", job)
        good = 0
        versions = range(1, 12) if not quick else (3, 7, 11)
        for version in versions:
            again, _ = c.run(golden.spec("adamw_clip", 2) | {"init": {"path": os.path.join(base, "t1-v%d" % version),
                                                                      "resume": True}})
            good += tensors.digest(golden.export(c, again)) == want
        report.check("resume at every round: equal hash", "%d of %d" % (len(versions), len(versions)),
                     "%d of %d" % (good, len(versions)), good == len(versions))
    rng = random.Random(int(os.environ.get("SEED", "1")))
    tries, good = (2 if quick else 8), 0
    spec = nano_spec(2, rounds=120, every=10)
    with Cluster(servers=2, workers=2) as c:
        job, _ = c.run(spec)
        want = export_digest(c, job, folder)
    for _ in range(tries):
        with Cluster(servers=2, workers=2) as c:
            job = c.submit(spec)
            time.sleep(0.5 + rng.random() * 4)
            c.kill_all()
            c.restart_all()
            c.wait(job)
            good += export_digest(c, job, folder) == want
    report.check("kill -9 of everything at a random instant, restarted: equal hash", "%d of %d" % (tries, tries),
                 "%d of %d" % (good, tries), good == tries)


def export_digest(c, job, folder):
    out = os.path.join(folder, "export-%d" % time.time_ns())
    c.sluice("export", job, out)
    return tensors.digest(os.path.join(out, "model.safetensors"))


def part_kill(report, folder, quick):
    kills = 5 if quick else 30
    spec = nano_spec(2, rounds=80 if quick else 400, every=200)
    rng = random.Random(int(os.environ.get("SEED", "1")))
    with Cluster(servers=2, workers=2) as c:
        job, _ = c.run(spec)
        want = export_digest(c, job, folder)
    with Cluster(servers=2, workers=2) as c:
        job, times, done = c.submit(spec), [], 0
        while done < kills:
            status = c.status(job)
            if status["state"] in ("SUCCEEDED", "FAILED", "CANCELLED"):
                if status["state"] != "SUCCEEDED" or export_digest(c, job, folder) != want:
                    break
                job = c.submit(spec)
                continue
            if int(status.get("rounds_done", 0)) < 1 or status["state"] != "RUNNING":
                continue
            time.sleep(rng.random() * 0.6)
            before = int(c.status(job).get("rounds_done", 0))
            began = time.time()
            c.kill("worker-%d" % rng.randrange(2))
            done += 1
            while True:
                now = c.status(job)
                if int(now.get("rounds_done", 0)) > before + 1 or now["state"] in ("SUCCEEDED", "FAILED"):
                    break
            times.append(time.time() - began)
        status = c.wait(job)
        equal = export_digest(c, job, folder) == want
        report.check("kill -9 of a worker at %d random instants: equal hash" % kills, "equal", "equal" if equal else "DIFFERENT",
                     equal and done == kills)
        times.sort()
        report.shown("time from the kill to two further commits (worker restarted)",
                     "median %.2f s, largest %.2f s" % (times[len(times) // 2], times[-1]))


# ------------------------------------------------------------------------------------------------------ quality
def part_nano(report, folder, quick):
    if quick:
        with Cluster(servers=2, workers=2) as c:
            began = time.time()
            _, status = c.run(nano_spec(2, rounds=300))
            report.at_most("nano, 300 rounds, seed 1: validation loss", 2.60, status["last_evaluation"]["loss"])
            report.shown("nano, 300 rounds, 2 workers: wall time", "%.1f s" % (time.time() - began))
        return
    found, walls = {}, {}
    for seed in (1, 2, 3):
        with Cluster(servers=2, workers=2) as c:
            began = time.time()
            _, status = c.run(nano_spec(2, seed=seed))
            walls[seed], found[seed] = time.time() - began, status["last_evaluation"]["loss"]
    with Cluster(servers=2, workers=1) as c:
        began = time.time()
        _, status = c.run(nano_spec(1))
        one, one_wall = status["last_evaluation"]["loss"], time.time() - began
    report.at_most("nano validation loss, mean of seeds 1-3", 1.895, sum(found.values()) / 3)
    report.at_most("nano validation loss, worst of seeds 1-3", 1.92, max(found.values()))
    report.at_most("nano, seed 1: |1 worker - 2 workers|", 0.005, abs(one - found[1]))
    env = dict(os.environ, OMP_NUM_THREADS="1", LD_LIBRARY_PATH=OPENMP_BLAS)
    began = time.time()
    peer = program(PYTHON, os.path.join(SHARED, "peers", "nano_reference.py"), DATA, "1", env=env)
    report.shown("nano wall time: 2 workers / 1 worker / PyTorch 1 thread",
                 "%.0f s / %.0f s / %.0f s" % (walls[1], one_wall, time.time() - began))
    report.shown("PyTorch in the same run", peer.stdout.strip().splitlines()[-1])


def part_fashion(report, folder, quick):
    base = "/usr/share/datasets/fashion-mnist"
    names = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]
    files = []
    for name in names:
        hit = [p for d in (base, "/usr/share/dataset/fashion-mnist", "/usr/share/dataset-fashion-mnist", "/usr/share/fashion-mnist")
               for p in glob.glob(os.path.join(d, "**", name + "*"), recursive=True)]
        if not hit:
            return report.skipped("Fashion-MNIST", "dataset-fashion-mnist is not installed")
        files.append(hit[0])
    epochs = 1 if quick else 10
    spec = {"name": "fashion", "model": {"mlp": {"inputs": 784, "hidden": [256, 128], "classes": 10}},
            "data": {"idx": {"images": files[0], "labels": files[1], "validation_images": files[2], "validation_labels": files[3]}},
            "train": {"rounds": epochs * 60000 // 100, "batch": 100, "eval_every": 600},
            "optimizer": {"adam": {"learning_rate": 1e-3}, "schedule": {"cosine": {"warmup_rounds": 50, "final": 1e-5}}},
            "parallel": {"data": 2}}
    with Cluster(servers=2, workers=2) as c:
        began = time.time()
        _, status = c.run(spec)
    report.at_least("MLP on Fashion-MNIST, %d epochs: test accuracy" % epochs, 0.80 if quick else 0.87,
                    status["last_evaluation"]["accuracy"])
    report.shown("MLP on Fashion-MNIST: wall time", "%.1f s" % (time.time() - began))


def part_export(report, folder):
    golden = Golden(os.path.join(folder, "export"))
    with Cluster(servers=2, workers=2) as c:
        job, _ = c.run(golden.spec("adamw", 2))
        weights = golden.export(c, job)
    model = os.path.dirname(weights)
    ids = [int(x) for x in np.random.RandomState(5).randint(0, 96, 40)]
    peer = subprocess.run([PYTHON, os.path.join(SHARED, "peers", "gpt2_reference.py"), "logits", model], text=True,
                          input=" ".join(map(str, ids)), stdout=subprocess.PIPE)
    want = np.array(json.loads(peer.stdout))
    ours = program(os.path.join(BIN, "sluice"), "sample", model, "--tokens", " ".join(map(str, ids)), "--logits")
    have = np.array(json.loads(ours.stdout))
    report.at_most("exported model in PyTorch: logits, error / largest", 1e-4,
                   float(np.max(np.abs(want - have)) / np.max(np.abs(want))))


def part_large(report, folder):
    images, labels = os.path.join(folder, "big-images"), os.path.join(folder, "big-labels")
    import struct
    rng = np.random.RandomState(1)
    with open(images, "wb") as f:
        f.write(struct.pack(">IIII", 0x803, 8, 28, 28) + rng.bytes(8 * 784))
    with open(labels, "wb") as f:
        f.write(struct.pack(">II", 0x801, 8) + bytes(range(8)))
    hidden = 743000  # 784*h + h + 10*h + 10 = 590 M elements, 2.2 GiB
    spec = {"name": "large", "model": {"mlp": {"inputs": 784, "hidden": [hidden], "classes": 10}},
            "data": {"idx": {"images": images, "labels": labels}, "validation_fraction": 0},
            "train": {"rounds": 2, "batch": 4, "eval_every": 2, "nonfinite": "SKIP_CHUNK"},
            "optimizer": {"sgd": {"learning_rate": 0.01}}, "checkpoint": {"every_rounds": 2, "keep": 1}}
    with Cluster(servers=2, workers=1, threads=2) as c:
        job = c.submit(spec)
        began = time.time()
        status = c.wait(job)
        peak = c.peak_memory()
        shutil.rmtree(os.path.join(c.folder, "checkpoints"), ignore_errors=True)
    report.check("2.2 GiB parameter space, 2 rounds", "succeeds", status["state"], status["state"] == "SUCCEEDED")
    report.shown("2.2 GiB parameter space: peak memory", ", ".join("%s %d MiB" % x for x in sorted(peak.items())) +
                 "; %.0f s" % (time.time() - began))


def part_simulation(report, quick):
    seeds = 500 if quick else 20000
    done = program(os.path.join(BIN, "simulate"), "--seeds", str(seeds))
    report.check("simulation: %d seeds" % seeds, "0 failures", done.stdout.strip().splitlines()[-1], done.returncode == 0)
    for rule in ("fencing", "dedup", "kept_version", "persist_first", "verdict_carried", "take_oldest"):
        done = program(os.path.join(BIN, "simulate"), "--seeds", str(1000 if quick else 2000), "--off", rule)
        report.check("simulation without %s" % rule, "seeds fail", done.stdout.strip().splitlines()[-1], done.returncode == 1)


def part_arithmetic(report):
    done = program(os.path.join(BIN, "optimizer_test"))
    last = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    for what, target, measured, verdict in rows_of(done.stdout):
        report.add(what, target, measured, verdict)
    if not last:
        report.check("server arithmetic: optimizer_test", "passes", "exit %d" % done.returncode, done.returncode == 0)


def part_bench(report, quick):
    pace = ["--pairs=3", "--seconds=0.1"] if quick else ["--pairs=11"]
    measured = bench("--only=transfers", *pace)["transfers"][0]
    report.check("push and pull of 64 MiB: every element", "as computed here", "yes" if measured["verified"] else "NO", measured["verified"])
    noisy = "NOISY" if measured["noisy"] else ""
    for key, name in {"tcp_into_place": "TCP into place", "server": "server"}.items():
        path = measured["paths"][key]
        for way in ("push", "pull"):
            r = path[way]
            report.add("64 MiB %s, %s" % (way, name), "", "%.2f GB/s (%.2f to %.2f), %.2f of TCP" % (
                r["gb_per_s"], r["gb_per_s_q1"], r["gb_per_s_q3"], r["ratio"]), noisy)
        report.add("64 MiB, %s: CPU s/GB, worker + server" % name, "", "%.2f + %.2f" % (
            path["cpu_s_per_gb_worker"], path["cpu_s_per_gb_server"]), noisy)


if __name__ == "__main__":
    sys.exit(run_parts([
        ("arithmetic", False, lambda report, folder, quick: part_arithmetic(report)),
        ("golden", True, lambda report, folder, quick: part_golden(report, folder)),
        ("resume", True, part_resume),
        ("kill", True, part_kill),
        ("export", True, lambda report, folder, quick: part_export(report, folder)),
        ("simulation", False, lambda report, folder, quick: part_simulation(report, quick)),
        ("fashion", False, part_fashion),
        ("nano", True, part_nano),
        ("bench", False, lambda report, folder, quick: part_bench(report, quick)),
        ("large", False, lambda report, folder, quick: quick or part_large(report, folder))]))
