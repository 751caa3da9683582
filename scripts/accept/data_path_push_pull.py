"""Push and pull of 64 MiB with SGD, one decision a round, in the stream and in shared memory, against raw TCP that moves the same
floats between the same two memories in the same run; 1 KiB there and back against a raw ping-pong; what chunk sizes, wire formats
and numbers of processes cost."""
import json
import os
import shutil

from cluster import BIN, Failed
from runner import program

NEEDS_SHARED = False


def ahead():
    """Where this is allowed, at a priority that keeps other programs off the cores for the seconds that it takes."""
    return ["chrt", "-f", "10"] if shutil.which("chrt") and program("chrt", "-f", "10", "true").returncode == 0 else []


def bench(*args):
    done = program(*ahead(), os.path.join(BIN, "bench_push_pull"), "--json", *args)
    if done.returncode != 0:
        raise Failed("bench_push_pull: exit %d: %s" % (done.returncode, " ".join(done.stdout.split())[-300:]))
    return json.loads(done.stdout)


def cpu(path):
    return path["cpu_s_per_gb_worker"] + path["cpu_s_per_gb_server"]


def part_push_pull(report, folder, quick):
    pace = ["--pairs=3", "--seconds=0.1"] if quick else ["--pairs=11", "--seconds=0.5"]
    measured = bench(*pace)
    report.check("push and pull of 64 MiB, 1 KiB there and back: every element", "as computed here", "yes",
                 measured["trips"]["verified"] and all(row["verified"] for row in measured["transfers"]))
    transfers(report, measured["transfers"][0])
    trips(report, measured["trips"])
    sweeps(report, quick)


def transfers(report, row):
    paths = row["paths"]
    for key, path in paths.items():
        report.shown(key + ": push, pull", "%.2f (%.2f-%.2f), %.2f (%.2f-%.2f) GB/s; CPU %.2f s/GB" % (
            *(path[way][q] for way in ("push", "pull") for q in ("gb_per_s", "gb_per_s_q1", "gb_per_s_q3")), cpu(path)))
    for name, key, speed, cost in (("TCP stream", "server", 0.70, 1.8), ("shared memory", "shared_memory", 1.6, 0.8)):
        for way in ("push", "pull"):
            found = paths[key][way]
            report.fast("%s, %s of 64 MiB / raw TCP (quartiles %.2f-%.2f)" % (name, way, found["ratio_q1"], found["ratio_q3"]), speed,
                        found["ratio"], noisy=row["noisy"])
        report.fast("%s: CPU s/GB of both ends, optimizer included / raw TCP" % name, cost, cpu(paths[key]) / cpu(paths["tcp_into_place"]),
                    noisy=row["noisy"], most=True)


def trips(report, measured):
    noisy, one, many = measured["noisy"], measured["one"], measured["many"]
    for count, paths in ((1, one), (64, many)):
        for key, path in paths.items():
            report.shown("1 KiB, %d under way, %s" % (count, key), "%.1f us (%.1f-%.1f), %.0f/s; time %.2f of TCP" % (
                1e6 * path["seconds"], 1e6 * path["seconds_q1"], 1e6 * path["seconds_q3"], path["per_s"], path["time_ratio"]))
    report.fast("push of 1 KiB to its acknowledgement / raw ping-pong", 2.2, one["server_taken"]["time_ratio"], noisy=noisy, most=True)
    report.fast("frames/s, 64 under way, to the acknowledgement / raw ping-pong", 0.60, many["server_taken"]["rate_ratio"], noisy=noisy)


def sweeps(report, quick):
    """Numbers without a target, but every element is checked."""
    size = ["--mib=4", "--pairs=1", "--seconds=0.03"] if quick else ["--mib=16", "--pairs=11", "--seconds=0.5"]
    rows = bench(*size, "--only=transfers", "--shapes=1x1,1x2,2x2", "--chunk_kib=1,64,1024")["transfers"]
    rows += bench(*size, "--only=transfers", "--shapes=" + ("2x2" if quick else "1x1,2x2"), "--push=f32,bf16,f16,int8,top_k",
                  "--pull=f32,bf16")["transfers"]
    for row in rows:
        what = "%dx%d, chunks of %d KiB, push %s, pull %s" % tuple(row[k] for k in ("workers", "servers", "chunk_kib", "push", "pull"))
        for key, name in (("server", "TCP stream"), ("shared_memory", "shared memory")):
            if key not in row["paths"]:
                continue
            path = row["paths"][key]
            report.shown("%s, %s" % (what, name), "%.2f, %.2f GB/s of float32; / raw TCP of float32 %.2f, %.2f%s" % (
                path["push"]["gb_per_s"], path["pull"]["gb_per_s"], path["push"]["ratio"], path["pull"]["ratio"],
                ", NOISY" if row["noisy"] else ""))
    report.check("%d combinations of processes, chunk sizes and formats: every element" % len(rows), "as computed here", "yes",
                 all(row["verified"] for row in rows))
