"""Daemons as child processes on loopback, for acceptance runs: start, kill -9, restart, submit, wait."""
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import threading
import time

BIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "build", "release", "bin")


def _die_with_parent():
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)


class Failed(Exception):
    pass


class Cluster:
    """`with Cluster(servers=2, workers=2) as c: job = c.submit(spec); c.wait(job)`"""

    def __init__(self, servers=2, workers=2, threads=1, folder=None, device="cpu", supervise=True, server_flags=(), worker_flags=()):
        self.folder = folder or tempfile.mkdtemp(prefix="sluice-accept-")
        self.servers, self.workers, self.threads, self.device = servers, workers, threads, device
        self.daemons, self.lock, self.ending, self.supervise = {}, threading.RLock(), False, supervise
        self.rusage, self.server_flags, self.worker_flags = {}, list(server_flags), list(worker_flags)

    def __enter__(self):
        self.start("scheduler")
        for i in range(self.servers):
            self.start("server-%d" % i)
        for i in range(self.workers):
            self.start("worker-%d" % i)
        return self

    def __exit__(self, *what):
        self.stop()

    def _command(self, name):
        role = name.split("-")[0]
        command = [os.path.join(BIN, "sluice-" + role), "--name=" + name, "--port_file=" + self.port_file(name)]
        listen = getattr(self, "scheduler_port", 0) if role == "scheduler" else 0
        command.append("--listen=127.0.0.1:%d" % listen)
        if role != "scheduler":
            command.append("--scheduler=127.0.0.1:%d" % self.scheduler_port)
        if role != "worker":
            command.append("--checkpoint_root=" + os.path.join(self.folder, "checkpoints"))
        if role == "scheduler":
            command.append("--state_dir=" + os.path.join(self.folder, "state"))
        if role == "worker":
            command += ["--threads=%d" % self.threads, "--device=" + self.device]
        return command + {"server": self.server_flags, "worker": self.worker_flags}.get(role, [])

    def log(self, name):
        with open(os.path.join(self.folder, "logs", name + ".log")) as f:
            return f.read()

    def port_file(self, name):
        return os.path.join(self.folder, name + ".port")

    def start(self, name):
        process = self._spawn(name)
        if self.supervise:
            threading.Thread(target=self._watch, args=(name, process), daemon=True).start()

    def _spawn(self, name):
        os.makedirs(os.path.join(self.folder, "logs"), exist_ok=True)
        if os.path.exists(self.port_file(name)):
            os.remove(self.port_file(name))
        log = open(os.path.join(self.folder, "logs", name + ".log"), "a")
        process = subprocess.Popen(self._command(name), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                   preexec_fn=_die_with_parent)
        with self.lock:
            self.daemons[name] = process
        deadline = time.time() + 30
        while not os.path.exists(self.port_file(name)):
            if process.poll() is not None or time.time() > deadline:
                raise Failed("%s did not start: see %s" % (name, log.name))
            time.sleep(0.005)
        if name == "scheduler":
            self.scheduler_port = int(open(self.port_file(name)).read())
        return process

    def _watch(self, name, process):
        # This thread stays while its child lives: the child's parent-death signal is bound to the thread that made it.
        while True:
            process.wait()
            with self.lock:
                if self.ending or self.daemons.get(name) is not process:
                    return
            process = self._spawn(name)

    def kill(self, name):
        with self.lock:
            process = self.daemons[name]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def kill_all(self):
        with self.lock:
            self.ending = True
            for process in self.daemons.values():
                process.send_signal(signal.SIGKILL)
            for process in self.daemons.values():
                process.wait()
            self.daemons = {}

    def restart_all(self):
        self.ending = False
        self.__enter__()

    def peak_memory(self):
        """{name: peak resident MiB} of the daemons now running."""
        out = {}
        for name, process in self.daemons.items():
            for line in open("/proc/%d/status" % process.pid):
                if line.startswith("VmHWM"):
                    out[name] = int(line.split()[1]) // 1024
        return out

    def stop(self):
        with self.lock:
            self.ending = True
            for process in self.daemons.values():
                process.terminate()
            for process in self.daemons.values():
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    # ------------------------------------------------------------------------------------------------ client
    def sluice(self, *args, check=True, text=True):
        done = subprocess.run([os.path.join(BIN, "sluice"), *args, "--scheduler=127.0.0.1:%d" % self.scheduler_port],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=text, stdin=subprocess.DEVNULL)
        if check and done.returncode:
            raise Failed("sluice %s: exit %d: %s" % (" ".join(args), done.returncode, done.stderr))
        return done

    def submit(self, spec, *sets, extra=()):
        path = os.path.join(self.folder, "spec-%d.json" % time.time_ns())
        with open(path, "w") as f:
            json.dump(spec, f)
        args = ["submit", path, *extra]
        for s in sets:
            args += ["--set", s]
        return self.sluice(*args).stdout.split()[0]

    def status(self, job):
        return json.loads(self.sluice("status", job, "--json").stdout)

    def wait(self, job, timeout=3600):
        """Until the job has ended; the final status. Raises unless it succeeded."""
        done = subprocess.run([os.path.join(BIN, "sluice"), "watch", job, "--scheduler=127.0.0.1:%d" % self.scheduler_port],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
        status = self.status(job)
        if done.returncode:
            raise Failed("%s: %s %s (exit %d) %s" % (job, status["state"], status.get("message", ""), done.returncode, done.stderr))
        return status

    def history(self, job):
        return json.loads(self.sluice("logs", job, "--json").stdout)

    def run(self, spec, *sets, extra=(), timeout=3600):
        job = self.submit(spec, *sets, extra=extra)
        return job, self.wait(job, timeout)
