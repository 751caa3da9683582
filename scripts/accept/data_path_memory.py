"""What a server's streams cost in memory: clients that hardly read, calls of Pull that read nothing, gradients that wait for
others. Resident memory (VmRSS) of a real sluice-server whose job trains on; bench_slow_readers is the clients."""
import json
import os
import struct
import subprocess
import threading
import time

from cluster import BIN, Cluster, Failed

NEEDS_SHARED = False
MB = 1e6


class MemoryCluster(Cluster):
    """Nothing by shared memory: all bytes pass the socket."""

    def _command(self, name):
        return super()._command(name) + ([] if name == "scheduler" else ["--shared_memory=false"])


class Watch:
    """Peak of VmRSS (bytes) and Threads of a process while it is open."""

    def __init__(self, pid):
        self.pid, self.rss, self.threads, self.end = pid, 0, 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *what):
        self.end.set()
        self.thread.join()

    def _watch(self):
        while not self.end.wait(0.02):
            try:
                with open("/proc/%d/status" % self.pid) as f:
                    fields = dict(line.split(":", 1) for line in f)
            except OSError:
                return
            if "VmRSS" in fields:
                self.rss = max(self.rss, int(fields["VmRSS"].split()[0]) * 1024)
                self.threads = max(self.threads, int(fields["Threads"]))


def idx_files(folder):
    images, labels = os.path.join(folder, "memory-images"), os.path.join(folder, "memory-labels")
    with open(images, "wb") as f:
        f.write(struct.pack(">IIII", 0x803, 64, 28, 28) + bytes((i * 7919 >> 3) % 256 for i in range(64 * 784)))
    with open(labels, "wb") as f:
        f.write(struct.pack(">II", 0x801, 64) + bytes(i % 10 for i in range(64)))
    return {"images": images, "labels": labels}


def spec_of(folder, hidden, rounds, batch, workers=1, **more):
    return {"name": "memory", "model": {"mlp": {"inputs": 784, "hidden": [hidden], "classes": 10}},
            "data": {"idx": idx_files(folder), "validation_fraction": 0},
            "train": {"rounds": rounds, "batch": batch, "eval_every": rounds},
            "optimizer": {"sgd": {"learning_rate": 1e-6}, "clip_norm": 1.0}, "parallel": {"data": workers},
            "checkpoint": {"every_rounds": rounds}, **more}


def rounds_done(cluster, job):
    return int(cluster.status(job).get("rounds_done", 0))


def await_round(cluster, job, target):
    deadline = time.time() + 120
    while rounds_done(cluster, job) < target:
        if time.time() > deadline:
            raise Failed("%s: no round %d: %s" % (job, target, cluster.status(job)))
        time.sleep(0.1)


def slow_readers(cluster, job, seconds, streams, pulls=0, bytes_per_second=1e6):
    port = int(open(cluster.port_file("server-0")).read())
    done = subprocess.run([os.path.join(BIN, "bench_slow_readers"), "--server=127.0.0.1:%d" % port, "--job=" + job,
                           "--streams=%d" % streams, "--pulls=%d" % pulls, "--bytes_per_second=%d" % bytes_per_second,
                           "--seconds=%g" % seconds], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          stdin=subprocess.DEVNULL, timeout=seconds + 120)
    if done.returncode:
        raise Failed("bench_slow_readers: exit %d: %s %s" % (done.returncode, done.stdout, done.stderr[-500:]))
    return json.loads(done.stdout)


def readers(report, folder, quick):
    hidden = 5300 if quick else 21000
    seconds, limit = (6, 256 << 20) if quick else (15, 256 << 20)
    parameters = 795 * hidden + 10
    with MemoryCluster(servers=1, workers=1, supervise=False, server_flags=["--stream_memory=%d" % limit]) as c:
        job = c.submit(spec_of(folder, hidden, 1000000, 32))
        await_round(c, job, 5)
        pid = c.daemons["server-0"].pid
        with Watch(pid) as alone:
            time.sleep(3)
        report.shown("memory: %.1f million parameters, SGD, one decision a round: server alone with the job" % (parameters / 1e6),
                     "%.0f MB, %d threads" % (alone.rss / MB, alone.threads))
        for streams, pulls, pace in ((8, 0, 1e6), (200, 0, 1e5), (200, 100, 1e5)):
            before = rounds_done(c, job)
            with Watch(pid) as watch:
                said = slow_readers(c, job, seconds, streams, pulls, pace)
            more, after = max(0, watch.rss - alone.rss), rounds_done(c, job)
            what = "memory: %d slow readers" % streams + (", %d unread Pulls" % pulls if pulls else "")
            report.shown(what, "+%.1f MB, %d threads; %d rounds meanwhile; %d streams opened, %d frames read, %d of %d had none" % (
                more / MB, watch.threads, after - before, said["opened"], said["frames"], said["starved"], streams))
            if streams == 8:
                report.at_most(what + ": MB each, above the job alone", 40, more / MB / streams, "%.1f")
            else:
                report.at_most(what + ": MB above the job alone (--stream_memory)", limit / MB, more / MB, "%.0f")
            report.at_least(what + ": rounds go on", 1, after - before, "%d")
            if pulls:  # GetPlan, which each stream asks for at its opening, has a thread while it is answered
                report.at_most(what + ": threads more than without the Pulls", pulls // 2, watch.threads - threads, "%d")
            threads = watch.threads


def holding(report, folder, quick):
    """Three workers (the third waits for the sum of the first two), with room for everything and for nothing."""
    losses = {}
    for name, flag in (("room", []), ("none", ["--hold_memory=1"])):
        with MemoryCluster(servers=1, workers=3, supervise=False, server_flags=flag) as c:
            job, status = c.run(spec_of(folder, 500, 10 if quick else 30, 8, workers=3, optimizer={"sgd": {"learning_rate": 0.1}}))
            losses[name] = [r["loss"] for r in c.history(job)["records"] if not r.get("evaluation")]
            declined = "--hold_memory" in c.log("server-0")
    report.check("--hold_memory=1: contributions are declined", "yes", "yes" if declined else "no", declined)
    report.check("--hold_memory=1: losses of %d rounds of 3 workers" % len(losses["none"]), "as with room for all",
                 "the same bits" if losses["none"] == losses["room"] else str(losses), bool(losses["none"]) and losses["none"] == losses["room"])


def part_memory(report, folder, quick):
    readers(report, folder, quick)
    holding(report, folder, quick)
