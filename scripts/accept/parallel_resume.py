"""A checkpoint of one layout goes on in any other."""
import os

from cluster import BIN, Cluster
from golden import Golden, check_job
from parallel_golden import mesh_spec
from runner import program

CHANGES = (((1, 1, 1), (1, 2, 2)), ((2, 2, 1), (1, 1, 2)), ((1, 1, 2), (1, 4, 1)), ((1, 2, 2), (2, 1, 1)))


def part_resume(report, folder, quick):
    done = program(os.path.join(BIN, "chunk_source_test"), "--gtest_filter=*Layout*")
    report.check("value and optimizer state written in one layout, read in another: bits (chunk_source_test)", "passes",
                 "exit %d" % done.returncode, done.returncode == 0 and "PASSED" in done.stdout)
    golden = Golden(os.path.join(folder, "mesh-resume"))
    for one, other in CHANGES[1:3] if quick else CHANGES:
        workers = max(d * t * p for d, t, p in (one, other))
        name = "saved in (%d,%d,%d), resumed at round 6 in (%d,%d,%d)" % (*one, *other)
        with Cluster(servers=2, workers=workers) as c:
            job, _ = c.run(mesh_spec(golden, "adamw_clip", one))
            spec = mesh_spec(golden, "adamw_clip", other, chunk=4096)
            spec["init"] = {"path": os.path.join(c.folder, "checkpoints", job, "t1-v6"), "resume": True}
            again, _ = c.run(spec)
            check_job(report, name, c, golden, "adamw_clip", again, first=6)
