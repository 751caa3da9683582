"""What a rank holds and sends."""
import json
import os
import re

from cluster import BIN, Cluster
from parallel_pipeline import small_gpt
from runner import program, rows_of

NEEDS_SHARED = False


def part_size(report, folder, quick):
    for test in ("mesh_test", "layout_test", "mesh_costs_test", "model_traffic_test"):
        done = program(os.path.join(BIN, test))
        report.check("size: " + test, "passes", "exit %d" % done.returncode, done.returncode == 0)
        for row in rows_of(done.stdout):
            report.add(*row)
    limit = 20000000
    with Cluster(servers=1, workers=2, worker_flags=["--memory_limit=%d" % limit]) as c:
        name = "small GPT, workers with --memory_limit %d: " % limit
        path = os.path.join(folder, "over-the-limit.json")
        with open(path, "w") as f:
            json.dump(small_gpt(folder), f)
        refused = c.sluice("submit", path, check=False)
        said = refused.stderr.strip().splitlines()[-1] if refused.stderr.strip() else "nothing"
        report.check(name + "T=1", "refused with the arithmetic", said, refused.returncode != 0 and str(limit) in said and " x " in said)
        _, status = c.run(small_gpt(folder, tensor=2) | {"train": {"rounds": 3, "batch": 8, "eval_every": 0}})
        report.check(name + "T=2", "trains", status["state"], status["state"] == "SUCCEEDED")
    done = program(os.path.join(BIN, "frames_test"))
    report.check("size: frames_test", "passes", "exit %d" % done.returncode, done.returncode == 0)
    one, four = map(float, re.search(r"small GPT: on 1 rank ([\d.]+), on 4 tensor ranks ([\d.]+)", done.stdout).groups())
    report.at_most("small GPT: frames a round at T=4 (%.1f) / at T=1 (%.1f)" % (four, one), 1.3, four / one)
