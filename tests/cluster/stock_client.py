#!/usr/bin/python3
"""examples/stock_client.py, with Debian's python3-grpcio, as the workers of real jobs: the results' bits against numpy.

    tests/cluster/stock_client.py [FOLDER OF THE PROGRAMS]      default: build/release/bin

Exit codes: 0 passed, 1 failed, 77 skipped with a reason.
"""
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(SOURCE, "scripts", "accept"))


def skip(reason):
    print("SKIPPED: " + reason)
    sys.exit(77)


try:
    import grpc
    import numpy as np
    import google.protobuf  # noqa: F401
except ImportError as error:
    skip("%s; install python3-grpcio, python3-protobuf and python3-numpy" % error)
if shutil.which("protoc") is None or not os.path.exists("/usr/bin/grpc_python_plugin"):
    skip("protoc or grpc_python_plugin is not installed (protobuf-compiler, protobuf-compiler-grpc)")

import cluster  # noqa: E402
import tensors  # noqa: E402

ROWS, FEATURES, CLASSES, ROUNDS, RATE = 150, 6, 3, 400, 0.5
PATIENCE = 60  # seconds, of waits that take milliseconds


def check(ok, what):
    print(("ok      " if ok else "FAILED  ") + what, flush=True)
    if not ok:
        raise cluster.Failed(what)


def write_table(path, rows, seed):
    random = np.random.RandomState(seed)
    with open(path, "w") as file:
        file.write(",".join("f%d" % i for i in range(FEATURES)) + ",class\n")
        for row in range(rows):
            label = row % CLASSES
            values = random.normal(size=FEATURES) + 0.7 * (np.arange(FEATURES) % CLASSES == label)
            file.write(",".join("%.4f" % v for v in values) + ",kind %d\n" % label)


class Client:
    """One process of the example."""

    def __init__(self, folder, address, name):
        self.path = os.path.join(folder, name + ".log")
        self.process = subprocess.Popen(
            [sys.executable, "-u", os.path.join(SOURCE, "examples", "stock_client.py"), "--scheduler=" + address,
             "--name=" + name], stdout=open(self.path, "w"), stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            preexec_fn=cluster._die_with_parent, env=dict(os.environ, OPENBLAS_NUM_THREADS="1"))

    def output(self):
        return open(self.path).read()

    def await_line(self, text):
        deadline = time.time() + PATIENCE
        while text not in self.output():
            if self.process.poll() is not None or time.time() > deadline:
                raise cluster.Failed("a client did not say '%s':\n%s" % (text, self.output()))
            time.sleep(0.01)

    def end(self):
        self.process.kill()
        self.process.wait()


def simulate(model, data, ranks):
    """SGD as the servers do it: the workers' sums added, times 1/count, in float32. model: the example's class."""
    p = {"bias": np.zeros(CLASSES, np.float32), "weight": np.zeros((CLASSES, FEATURES), np.float32)}
    parts = [model(data, rank, ranks) for rank in range(ranks)]
    losses = []
    for _ in range(ROUNDS):
        all_parts = [part.gradient(p) for part in parts]
        losses.append(sum(loss for _, loss, _ in all_parts) / ROWS)
        for name in p:
            total = all_parts[0][0][name]
            for gradient, _, _ in all_parts[1:]:
                total = total + gradient[name]
            p[name] = p[name] - np.float32(RATE) * (total * np.float32(1 / ROWS))
    return p, losses


def main():
    if len(sys.argv) > 1:
        cluster.BIN = sys.argv[1]
    folder = tempfile.mkdtemp(prefix="sluice-stock-")
    clients = []
    signal.alarm(200)  # whatever waits for ever: the daemons end with this process
    try:
        generated = os.path.join(folder, "generated")
        os.mkdir(generated)
        protos = glob.glob(os.path.join(SOURCE, "proto/sluice/v1/*.proto"))
        subprocess.run(["protoc", "-I" + os.path.join(SOURCE, "proto"), "--python_out=" + generated,
                        "--grpc_python_out=" + generated,
                        "--plugin=protoc-gen-grpc_python=/usr/bin/grpc_python_plugin", *protos], check=True)
        os.environ["PYTHONPATH"] = generated
        sys.path[:0] = [generated, os.path.join(SOURCE, "examples")]
        import stock_client
        from sluice.v1 import scheduler_pb2, scheduler_pb2_grpc

        train, test = os.path.join(folder, "train.csv"), os.path.join(folder, "test.csv")
        write_table(train, ROWS, 1)
        write_table(test, 60, 2)
        sets = ["data.csv.path=" + train, "data.csv.validation_path=" + test, "train.batch=%d" % ROWS,
                "train.rounds=%d" % ROUNDS, "parallel.chunk_elements=5", "optimizer.sgd.learning_rate=%g" % RATE]

        # Servers that hold next to nothing: of two clients each is asked for most of what it pushed once more.
        with cluster.Cluster(servers=2, workers=0, folder=folder, server_flags=["--hold_memory=1"]) as c:
            address = "127.0.0.1:%d" % c.scheduler_port
            stub = scheduler_pb2_grpc.SchedulerServiceStub(grpc.insecure_channel(address))

            def start(name):
                clients.append(Client(folder, address, name))
                clients[-1].await_line("registered")
                return clients[-1]

            def submit(ranks, *more):
                args = ["submit", os.path.join(SOURCE, "examples", "stock_client.yaml")]
                for each in sets + ["parallel.data=%d" % ranks, *more]:
                    args += ["--set", each]
                return c.sluice(*args).stdout.split()[0]

            def parameters(job):
                out = os.path.join(folder, "export-" + job)
                c.sluice("export", job, out)
                return tensors.read_folder(out)

            def spec_data(job):
                return stub.GetJob(scheduler_pb2.GetJobRequest(job_id=job)).spec.data.csv

            def check_bits(job, ranks, what):
                got, (want, losses) = parameters(job), simulate(stock_client.Softmax, spec_data(job), ranks)
                same = all(got[name].tobytes() == want[name].tobytes() for name in want)
                check(same, "%s: %d parameters after %d rounds have the bits of numpy's SGD" %
                      (what, sum(v.size for v in want.values()), ROUNDS))
                records = [r for r in stub.GetHistory(scheduler_pb2.GetHistoryRequest(job_id=job)).records
                           if not r.evaluation]
                worst = max(abs(r.loss - losses[r.round]) for r in records)
                check(len(records) == ROUNDS and worst < 1e-12, "%s: %d losses in the history, off by %.0e at most" %
                      (what, len(records), worst))
                return got

            # --- one client, alone
            job, alone = submit(1), start("client-a")
            c.wait(job, PATIENCE)
            check(alone.process.wait(PATIENCE) == 0, "a stock client trains a job to its end: exit code 0")
            python = check_bits(job, 1, "one client")

            # --- two clients; one of them and a server die, a third one steps in
            job = submit(2, "checkpoint.every_rounds=20", "train.eval_every=10")
            pair = [start("client-b"), start("client-c")]
            third = start("client-d")
            pair[0].await_line("version 30")
            pair[1].end()
            third.await_line("generation")
            third.await_line("version ")
            c.kill("server-1")
            c.wait(job, PATIENCE)
            status = c.status(job)
            check(int(status.get("recoveries", 0)) >= 2 and int(status.get("rewinds", 0)) >= 1,
                  "a client and a server died: %s recoveries, %s rewinds" % (status["recoveries"], status["rewinds"]))
            check(pair[0].process.wait(PATIENCE) == 0 and third.process.wait(PATIENCE) == 0,
                  "both clients: exit code 0")
            check_bits(job, 2, "two clients, two deaths")
            check("--hold_memory" in c.log("server-0"), "contributions were declined on the way")

            # --- the same job with Sluice's own worker
            c.start("worker-0")
            job = submit(1)
            c.wait(job, PATIENCE)
            own = parameters(job)
            off = max(float(np.abs(own[name] - python[name]).max()) for name in own)
            check(off < 1e-4, "sluice-worker comes to the same parameters: off by %.1e at most" % off)
    except Exception:
        for client in clients:
            print("--- " + client.path + "\n" + client.output())
        raise
    finally:
        for client in clients:
            client.end()
        shutil.rmtree(folder, ignore_errors=True)
    print("passed")


if __name__ == "__main__":
    main()
