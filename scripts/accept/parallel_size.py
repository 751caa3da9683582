"""What a rank holds and sends."""
import os
import re

from cluster import BIN
from runner import program

NEEDS_SHARED = False


def part_size(report, folder, quick):
    for test in ("mesh_test", "layout_test", "mesh_costs_test", "model_traffic_test"):
        done = program(os.path.join(BIN, test))
        report.check("size: " + test, "passes", "exit %d" % done.returncode, done.returncode == 0)
        for line in done.stdout.splitlines():
            if line.startswith("ROW "):
                what, target, measured, verdict = [x.strip() for x in line[4:].split("|")]
                report.add(what, target, measured, verdict)
    done = program(os.path.join(BIN, "frames_test"), "--gtest_filter=*TensorRanks*")
    one, four = map(float, re.search(r"small GPT: on 1 rank ([\d.]+), on 4 tensor ranks ([\d.]+)", done.stdout).groups())
    report.at_most("small GPT: frames a round at T=4 (%.1f) / at T=1 (%.1f)" % (four, one), 1.3, four / one)
