"""Meshes of every kind against the float64 reference, in one process and as daemons."""
import os

import tensors
from cluster import BIN, Cluster
from golden import Golden, losses
from one_job import rows_of
from runner import DATA, program

MESHES = ((1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2), (1, 4, 1), (4, 1, 2))  # data, tensor, pipeline


def mesh_spec(golden, case, mesh, chunk=0, **parallel):
    spec = golden.spec(case, mesh[0], chunk)
    spec["parallel"].update({"tensor": mesh[1], "pipeline": mesh[2]}, **parallel)
    return spec


def part_golden(report, folder, quick):
    filters = ["--gtest_filter=*D1_T2_P2:*D2_T2_P1"] if quick else []
    done = program(os.path.join(BIN, "golden_mesh_test"), *filters)
    found = False
    for what, target, measured, verdict in rows_of(done.stdout):
        found = True
        report.add("in-process " + what, target, measured, verdict)
    report.check("in-process meshes (golden_mesh_test)", "passes", "exit %d" % done.returncode, done.returncode == 0 and found)
    golden = Golden(os.path.join(folder, "mesh-golden"))
    for i, mesh in enumerate(((1, 2, 2), (2, 1, 2)) if quick else MESHES):
        servers, name = i % 3 + 1, "processes (%d,%d,%d), %d servers" % (*mesh, i % 3 + 1)
        case = ("adamw_clip", "sgd", "momentum", "adamw")[i % 4]
        reference = golden.reference["cases"][case]
        with Cluster(servers=servers, workers=mesh[0] * mesh[1] * mesh[2]) as c:
            spec = mesh_spec(golden, case, mesh, chunk=997 if i % 2 else 0, microbatches=1 + i % 3)
            job, _ = c.run(spec)
            error = max(abs(a - b) for a, b in zip(losses(c, job), reference["losses"], strict=True))
            weights = golden.export(c, job)
            again, _ = c.run(spec)
            same = tensors.digest(weights) == tensors.digest(golden.export(c, again))
        report.at_most(name + ", %s: loss error" % case, 5e-6, error)
        expected = tensors.read(os.path.join(DATA, "golden", "gpt2_%s_after_12.safetensors" % case))
        report.at_most(name + ", %s: parameters, relative norm" % case, 2e-5,
                       tensors.relative_norm(tensors.read(weights), expected, case.startswith("adam")))
        report.check(name + ": run twice", "equal hashes", "equal" if same else "DIFFERENT", same)
