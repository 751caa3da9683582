"""All-reduce of ranks: right in every size, and how fast beside plain sockets and PyTorch's gloo."""
import json
import os
import subprocess

from cluster import BIN, Failed
from runner import OPENMP_BLAS, PYTHON, program

NEEDS_SHARED = False

TESTS = ("collectives_test", "mail_boxes_test", "peer_mail_test", "hostile_mail_test", "pipeline_schedule_test", "model_parallel_test",
         "model_mutation_test", "model_dropout_test")


def part_collectives(report, folder, quick):
    for test in TESTS:
        done = program(os.path.join(BIN, test))
        report.check("collectives: " + test, "passes", "exit %d" % done.returncode, done.returncode == 0 and "PASSED" in done.stdout)
    sizes = (1, 1024) if quick else (1, 64, 1024, 16384)
    flags = ["--kib=" + ",".join(map(str, sizes)), "--json"] + (["--ranks=2", "--pairs=3", "--seconds=0.1"] if quick else [])
    done = subprocess.run([os.path.join(BIN, "bench_collectives"), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          stdin=subprocess.DEVNULL, timeout=600)
    if done.returncode:
        raise Failed("bench_collectives: exit %d: %s" % (done.returncode, done.stderr[-2000:]))
    gloo, why = {}, "--quick"
    if not quick:
        peer = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gloo_all_reduce.py")
        for ranks in (2, 4):
            run = program(PYTHON, peer, str(ranks), ",".join(map(str, sizes)), "0.2",
                          env=dict(os.environ, OMP_NUM_THREADS="1", LD_LIBRARY_PATH=OPENMP_BLAS))
            if run.returncode:
                gloo, why = {}, run.stdout.strip().splitlines()[-1] if run.stdout.strip() else "exit %d" % run.returncode
                break
            gloo[ranks] = json.loads(run.stdout.strip().splitlines()[-1])
    if not gloo:
        report.skipped("all-reduce by gloo in the same run", why)
    for row in json.loads(done.stdout)["rows"]:
        what = "all-reduce of %d KiB on %d ranks, every element verified" % (row["kib"], row["ranks"])
        report.check(what, "right", "right" if row["verified"] else "WRONG", row["verified"])
        text = ", ".join("%s %.0f us" % (name, 1e6 * row[key]["seconds"]) for key, name in (
            ("tcp", "plain sockets"), ("mail", "mail"), ("shared_memory", "mail in shared memory")) if key in row)
        if gloo:
            text += ", gloo %.0f us" % (1e6 * gloo[row["ranks"]][str(row["kib"])])
        report.shown("all-reduce of %d KiB on %d ranks" % (row["kib"], row["ranks"]), text)
