"""Push and pull of 64 MiB with SGD, one decision a round: in the stream and in shared memory, against a raw TCP blaster that
moves the same floats between the same two memories in the same run."""
import json
import os
import shutil

from cluster import BIN
from runner import program

NEEDS_SHARED = False


def part_push_pull(report, folder, quick):
    # Where this is allowed, at a priority that keeps other programs off the two cores for the seconds that it takes.
    ahead = ["chrt", "-f", "10"] if shutil.which("chrt") and program("chrt", "-f", "10", "true").returncode == 0 else []
    done = program(*ahead, os.path.join(BIN, "bench_push_pull"), "--json", "--pairs=%d" % (5 if quick else 31))
    report.check("push and pull of 64 MiB: every element", "as computed here", "exit %d" % done.returncode, done.returncode == 0)
    if done.returncode != 0:
        return report.shown("its last words", " ".join(done.stdout.split())[-200:])
    measured = json.loads(done.stdout)
    paths, noisy = measured["paths"], measured["noisy"]

    def cpu(key):
        return paths[key]["cpu_s_per_gb_worker"] + paths[key]["cpu_s_per_gb_server"]

    for key, path in paths.items():
        report.shown(key + ": push, pull", "%.2f (%.2f-%.2f), %.2f (%.2f-%.2f) GB/s; CPU %.2f s/GB" % (
            *(path[way][q] for way in ("push", "pull") for q in ("gb_per_s", "gb_per_s_q1", "gb_per_s_q3")), cpu(key)))
    for name, key, speed, cost in (("TCP stream", "server", 0.70, 1.8), ("shared memory", "shared_memory", 1.6, 0.8)):
        for way in ("push", "pull"):
            report.fast("%s, %s of 64 MiB / raw TCP" % (name, way), speed, paths[key][way]["ratio"], noisy=noisy)
        report.fast("%s: CPU s/GB of both ends, optimizer included / raw TCP" % name, cost, cpu(key) / cpu("tcp_into_place"),
                    noisy=noisy, most=True)
