"""Wire formats: what they cost at the socket, and what they cost in quality.

Bytes: one job on one server and one worker, real processes; what the kernel counted on the worker's TCP connection to the server
(ss -ti: bytes_acked up, bytes_received down), headers of gRPC and HTTP/2, acknowledgements of frames and everything else
included. The connection outlives the job, so the counters are read when all has been said. Two jobs that differ in their number of
rounds tell what a round costs; what they share is the first parameters and the residual for the last checkpoint. A format's bytes
are divided by those of f32 in the same direction.

Identity: what was pushed, and what the residuals in the last checkpoint hold, add up to the gradients, across a resume. The learning
rate is so small that parameters stay as they are, and the momentum the largest below 1, so that the momentum buffer is the sum of
all mean gradients that servers were sent, but for the 1e-7 that each round takes away.

Quality: the validation loss of the nano configuration after 1,000 rounds on two workers, against f32 of the same seed.
"""
import os
import re
import subprocess

import numpy as np
import tensors
from cluster import Cluster, Failed
from nano import nano_spec

F32, BF16 = {"f32": {}}, {"bf16": {}}


def socket_bytes(port):
    """(up, down) of all connections to a local port, as the connecting end counts."""
    out = subprocess.run(["ss", "-tinH", "state", "established", "dport", "=", ":%d" % port], stdout=subprocess.PIPE, text=True,
                         check=True).stdout
    up = sum(int(x) for x in re.findall(r"bytes_acked:(\d+)", out))
    down = sum(int(x) for x in re.findall(r"bytes_received:(\d+)", out))
    if up == 0 or down == 0:
        raise Failed("no connection to the server's port %d in: %s" % (port, out))
    return up, down


class SocketCluster(Cluster):
    """Nothing by shared memory: all bytes pass the socket."""

    def _command(self, name):
        return super()._command(name) + ([] if name == "scheduler" else ["--shared_memory=false"])


def bytes_of(push, pull, rounds):
    """(up, down) of so many rounds, and (up, down) of the rest: 10 rounds, the first parameters and the last checkpoint."""
    with SocketCluster(servers=1, workers=1, supervise=False) as c:
        seen = [(0, 0)]
        for n in (10, 10 + rounds):
            spec = nano_spec(1, rounds=n)
            spec["train"]["eval_samples"] = 12
            spec["transfer"] = {"push": push, "pull": pull}
            c.run(spec)
            seen.append(socket_bytes(int(open(c.port_file("server-0")).read())))
        first, second = ([b - a for a, b in zip(seen[i], seen[i + 1])] for i in range(2))
        return [b - a for a, b in zip(first, second)], first


def traffic(report, quick):
    rounds = 20 if quick else 100
    whole, rest = bytes_of(F32, F32, rounds)
    report.shown("nano, 1 server, 1 worker, f32: bytes at the socket, a round", "%d up, %d down" % tuple(x // rounds for x in whole))
    for name, push, limit in (("bf16", BF16, 0.51), ("f16", {"f16": {}}, 0.51), ("int8", {"int8": {}}, 0.27),
                              ("top 1%", {"top_k": {"density": 0.01}}, 0.022)):
        (up, down), extra = bytes_of(push, F32, rounds)
        report.at_most("push %s: bytes at the socket, of f32" % name, limit, up / whole[0])
        report.at_most("push %s leaves pulls as they are: bytes down, of f32" % name, 1.01, down / whole[1])
        report.shown("push %s: bytes up with the residual for a checkpoint, of a round of f32" % name,
                     "%.3f" % ((extra[0] - 10 * up / rounds) / (whole[0] / rounds)))
    (up, down), extra = bytes_of(F32, BF16, rounds)
    report.at_most("pull bf16: bytes at the socket, of f32", 0.51, down / whole[1])
    report.at_most("pull bf16 leaves pushes as they are: bytes up, of f32", 1.01, up / whole[0])


def quality(report, quick):
    rounds, seeds = (200, (1,)) if quick else (1000, (1, 2, 3))

    def top(density):
        return {"top_k": {"density": density, "warmup_rounds": rounds // 5}}

    formats = [("push bf16", BF16, F32, 0.003), ("push and pull bf16", BF16, BF16, 0.003), ("push int8", {"int8": {}}, F32, 0.003),
               ("push top 10%", top(0.1), F32, 0.10), ("push top 1%", top(0.01), F32, 0.25)]
    with Cluster(servers=2, workers=2) as c:
        for seed in seeds:
            def loss(push, pull):
                spec = nano_spec(2, rounds=rounds, seed=seed)
                spec["transfer"] = {"push": push, "pull": pull}
                return c.run(spec)[1]["last_evaluation"]["loss"]

            base = loss(F32, F32)
            report.shown("nano, %d rounds, seed %d, f32: validation loss" % (rounds, seed), "%.4f" % base)
            for name, push, pull, limit in formats:
                found = loss(push, pull)
                report.at_most("nano, %d rounds, seed %d, %s: validation loss above f32 (%.4f)" % (rounds, seed, name, found), limit,
                               found - base)


def slot_of(status, name):
    """One slot of the job's last checkpoint over the whole parameter space, as float64."""
    folder = status["last_checkpoint"]["directory"]
    pieces = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith(".safetensors"):
            for key, data in tensors.read(os.path.join(folder, file)).items():
                slot, first = key.rsplit(".", 1)
                if slot == name:
                    pieces[int(first)] = data.astype(np.float64)
    return np.concatenate([pieces[first] for first in sorted(pieces)])


def identity(report):
    def spec(rounds, push, workers):
        s = nano_spec(workers, rounds=rounds)
        s["optimizer"] = {"sgd": {"learning_rate": 1e-38, "momentum": 0.99999994}}
        s["train"]["eval_samples"] = 12
        s["transfer"] = {"push": push}
        return s

    with Cluster(servers=2, workers=3) as c:
        sums = slot_of(c.run(spec(6, F32, 2))[1], "momentum")
        for name, push in (("bf16", BF16), ("f16", {"f16": {}}), ("int8", {"int8": {}}), ("top 1%", {"top_k": {"density": 0.01}})):
            for workers in (2, 3):
                half = c.run(spec(3, push, 2))[0]
                end = c.run(spec(6, push, workers), extra=("--resume", half))[1]
                left = sum(slot_of(end, "residual-%d" % i) for i in range(workers)) / (12 * 64)
                error = np.linalg.norm(slot_of(end, "momentum") + left - sums) / np.linalg.norm(sums)
                report.at_most("push %s, 3 rounds by 2 workers, 3 from the checkpoint by %d: |pushed + residuals - gradients|"
                               " / |gradients| (left out: %.1e)" % (name, workers, np.linalg.norm(left) / np.linalg.norm(sums)),
                               1e-6, error)


def part_formats(report, folder, quick):
    traffic(report, quick)
    identity(report)
    quality(report, quick)
