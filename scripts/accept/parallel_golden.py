"""Meshes of every kind against the float64 reference, in one process and as daemons."""
import os

import tensors
from cluster import BIN, Cluster
from golden import Golden, check_job, golden_rows
from runner import program

MESHES = ((1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2), (1, 4, 1), (4, 1, 2))  # data, tensor, pipeline


def mesh_spec(golden, case, mesh, chunk=0, **parallel):
    spec = golden.spec(case, mesh[0], chunk)
    spec["parallel"].update({"tensor": mesh[1], "pipeline": mesh[2]}, **parallel)
    return spec


def part_golden(report, folder, quick):
    filters = ["--gtest_filter=*D1_T2_P2:*D2_T2_P1"] if quick else []
    done = program(os.path.join(BIN, "golden_mesh_test"), *filters)
    golden_rows(report, "meshes (golden_mesh_test)", done)
    golden = Golden(os.path.join(folder, "mesh-golden"))
    for i, mesh in enumerate(((1, 2, 2), (2, 1, 2)) if quick else MESHES):
        servers, name = i % 3 + 1, "processes (%d,%d,%d), %d servers" % (*mesh, i % 3 + 1)
        case = ("adamw_clip", "sgd", "momentum", "adamw")[i % 4]
        with Cluster(servers=servers, workers=mesh[0] * mesh[1] * mesh[2]) as c:
            spec = mesh_spec(golden, case, mesh, chunk=997 if i % 2 else 0, microbatches=1 + i % 3)
            job, _ = c.run(spec)
            weights = check_job(report, name + ", " + case, c, golden, case, job)
            again, _ = c.run(spec)
            same = tensors.digest(weights) == tensors.digest(golden.export(c, again))
        report.check(name + ": run twice", "equal hashes", "equal" if same else "DIFFERENT", same)
