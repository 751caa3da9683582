"""Machines on slow links, made of network namespaces: a switch (a bridge in a namespace of its own) and a cable to each machine
whose two ends let only so much through (tc tbf). Root only."""
import os
import shutil
import subprocess


class NoNamespaces(Exception):
    """With the reason."""


class Network:
    """`with Network({"a": 100, "b": None}) as net`: machines by name, with the rate of their cable in Mbit/s, each way (None: as it
    comes). net.place("a") is NAME@HOST for the benches."""

    # Of the token bucket: more than the largest segment that the kernel passes on as one (64 KiB), and so little that a bucket
    # that fills up in a pause does not count. The queue holds what 50 ms carry.
    BURST, LATENCY = "96kb", "50ms"

    def __init__(self, rates):
        self.rates, self.prefix, self.made = rates, "sluice-links-%d-" % os.getpid(), []
        self.hosts = {name: "10.77.0.%d" % (i + 1) for i, name in enumerate(rates)}

    def __enter__(self):
        if os.geteuid() != 0:
            raise NoNamespaces("network namespaces take root")
        for tool in ("ip", "tc"):
            if not shutil.which(tool):
                raise NoNamespaces(tool + " is not installed (iproute2)")
        try:
            self._make()
        except NoNamespaces:
            self.__exit__()
            raise
        return self

    def __exit__(self, *what):
        for name in reversed(self.made):  # takes its cables along
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
        self.made = []

    def place(self, name):
        return "%s%s@%s" % (self.prefix, name, self.hosts[name])

    def _do(self, *command):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise NoNamespaces("%s: %s" % (" ".join(command), done.stdout.strip()))

    def _namespace(self, name):
        self._do("ip", "netns", "add", self.prefix + name)
        self.made.append(self.prefix + name)

    def _make(self):
        switch = self.prefix + "switch"
        self._namespace("switch")
        self._do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        self._do("ip", "-n", switch, "link", "set", "bridge", "up")
        for name, rate in self.rates.items():
            host = self.prefix + name
            self._namespace(name)
            self._do("ip", "link", "add", "cable", "netns", host, "type", "veth", "peer", "name", name, "netns", switch)
            self._do("ip", "-n", switch, "link", "set", name, "master", "bridge", "up")
            self._do("ip", "-n", host, "address", "add", self.hosts[name] + "/24", "dev", "cable")
            self._do("ip", "-n", host, "link", "set", "cable", "up")
            self._do("ip", "-n", host, "link", "set", "lo", "up")
            for namespace, device in ((host, "cable"), (switch, name)) if rate else ():
                self._do("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", "%dmbit" % rate, "burst",
                         self.BURST, "latency", self.LATENCY)
