"""train.mode async: as accurate as sync, and every contribution applied exactly once, with processes killed meanwhile.

MNIST: of the 10,000 images in the t10k files the first 8,000 train and the last 2,000 test; seeds 1, 2, 3, the mean counts.

Counting, as a user can do it: black images, and a first job that learns, at an enormous rate, that all are of class 0; then
a second one, from those parameters, in which all are of class 1. Its gradients are 1 and -1 in the two biases, exactly, however
far they move, so SGD moves each by the learning rate for every contribution: the saved biases count. One element is a chunk.
"""
import glob
import gzip
import os
import random
import struct

import numpy as np

import tensors
from cluster import Cluster, Failed
from runner import DATA

RATE = 1 / 1024


def read_idx(path):
    raw = gzip.open(path).read()
    shape = struct.unpack(">%dI" % raw[3], raw[4:4 + 4 * raw[3]])
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def write_idx(path, values):
    with open(path, "wb") as f:
        f.write(struct.pack(">I", 0x800 + values.ndim) + struct.pack(">%dI" % values.ndim, *values.shape) + values.tobytes())
    return path


def mnist(folder):
    source = os.path.join(DATA, "cls", "mnist-t10k-%s-ubyte.gz")
    images, labels = read_idx(source % "images-idx3"), read_idx(source % "labels-idx1")
    parts = {"images": images[:8000], "labels": labels[:8000], "validation_images": images[8000:], "validation_labels": labels[8000:]}
    return {"idx": {name: write_idx(os.path.join(folder, "async-mnist-" + name), values) for name, values in parts.items()}}


def accuracy(report, folder, quick):
    data, seeds = mnist(folder), (1,) if quick else (1, 2, 3)
    spec = {"name": "mnist", "model": {"mlp": {"hidden": [128]}}, "data": data,
            "train": {"rounds": 375, "batch": 64, "eval_every": 125}, "optimizer": {"adam": {"learning_rate": 1e-3}}}
    means = {}
    for mode, workers in (("sync", 2), ("sync", 4), ("async", 2), ("async", 4)):
        reached, stale = [], []
        with Cluster(servers=2, workers=workers) as c:
            for seed in seeds:
                job, status = c.run(spec, "train.mode=" + mode, "train.seed=%d" % seed, "parallel.data=%d" % workers)
                reached.append(status["last_evaluation"]["accuracy"])
                stale += [r.get("staleness_mean", 0) for r in c.history(job)["records"] if not r.get("evaluation")]
        means[mode, workers] = np.mean(reached)
        name = "MNIST, %s, %d workers: mean test accuracy of %d" % (mode, workers, len(seeds))
        if mode == "sync":
            report.shown(name, "%.4f" % means[mode, workers])
        else:
            report.at_least(name, means["sync", workers] - 0.01, means[mode, workers], "%.4f")
            report.shown("MNIST, async, %d workers: mean staleness" % workers, "%.2f" % np.mean(stale))


def saved(c, job, slot="value"):
    """Elements of the last checkpoint by index."""
    values = {}
    for path in glob.glob(os.path.join(c.status(job)["last_checkpoint"]["directory"], "shard-*.safetensors")):
        for key, data in tensors.read(path).items():
            piece, first = key.rsplit(".", 1)
            if piece == slot:
                values.update({int(first) + i: float(v) for i, v in enumerate(np.ravel(data))})
    return values


def counting_spec(folder, workers, rounds, label=1, rate=RATE, mode="async"):
    idx = {"images": write_idx(os.path.join(folder, "black"), np.zeros((64, 2, 2), np.uint8)),
           "labels": write_idx(os.path.join(folder, "all-%d" % label), np.full(64, label, np.uint8))}
    return {"name": "counting", "model": {"mlp": {"inputs": 4, "classes": 2}}, "data": {"idx": idx},
            "train": {"mode": mode, "rounds": rounds, "batch": 8, "eval_every": 0}, "optimizer": {"sgd": {"learning_rate": rate}},
            "checkpoint": {"every_rounds": 50}, "parallel": {"data": workers, "chunk_elements": 1}}


def submit_counting(c, folder, workers, rounds):
    first, status = c.run(counting_spec(folder, workers, 3, label=0, rate=200, mode="sync"))
    job = c.submit(counting_spec(folder, workers, rounds) | {"init": {"path": status["last_checkpoint"]["directory"]}})
    return job, saved(c, first)


def count(c, job, first):
    values = saved(c, job)
    return (first[0] - values[0]) / RATE, (values[1] - first[1]) / RATE  # bias [2] comes first


def progress(c, job):
    """Rounds done; all of them when the job has ended, none while the scheduler is down."""
    try:
        status = c.status(job)
    except Failed:
        return 0
    return int(status["rounds" if status["state"] in ("SUCCEEDED", "FAILED") else "rounds_done"]) if "rounds_done" in status else 0


def counting(report, folder, quick):
    rng = random.Random(int(os.environ.get("SEED", "1")))
    for workers in (1, 2, 4):
        with Cluster(servers=2, workers=workers) as c:
            job, first = submit_counting(c, folder, workers, 100)
            c.wait(job)
            found = count(c, job, first)
        report.check("counting, %d workers: contributions in each bias" % workers, "%d" % (100 * workers), "%g, %g" % found,
                     found == (100 * workers, 100 * workers))
    rounds, kills = 500, 3 if quick else 8
    with Cluster(servers=2, workers=3) as c:
        job, first = submit_counting(c, folder, 2, rounds)
        for i in range(kills):
            goal = rounds * (i + 1) // (kills + 2)
            while progress(c, job) < goal:
                pass
            c.kill(rng.choice(["worker-0", "worker-1", "worker-2", "scheduler", "server-0"] if i % 2 else ["worker-0", "worker-1"]))
        status = c.wait(job)
        found = count(c, job, first)
    report.check("counting, 2 workers, %d daemons killed (%s recoveries, %s rewinds): contributions in each bias" % (
        kills, status.get("recoveries", 0), status.get("rewinds", 0)), "%d" % (2 * rounds), "%g, %g" % found,
        found == (2 * rounds, 2 * rounds))


def part_async(report, folder, quick):
    accuracy(report, folder, quick)
    counting(report, folder, quick)
