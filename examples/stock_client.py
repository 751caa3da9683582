#!/usr/bin/python3
"""A worker of a Sluice job in Python: softmax regression with numpy, over nothing but gRPC and the .proto files.

    apt-get install python3-grpcio python3-protobuf python3-numpy protobuf-compiler protobuf-compiler-grpc
    protoc -I proto --python_out=build --grpc_python_out=build \
           --plugin=protoc-gen-grpc_python=/usr/bin/grpc_python_plugin proto/sluice/v1/*.proto
    PYTHONPATH=build examples/stock_client.py --scheduler=127.0.0.1:7700 &
    sluice submit examples/stock_client.yaml --set data.csv.path=$PWD/train.csv \
           --set data.csv.validation_path=$PWD/test.csv --set train.batch=ROWS_OF_TRAIN_CSV

It registers with the scheduler as `sluice-worker` does, takes part in the first job whose plan names it, and ends with
it. Every round it computes the gradient over all rows of data.csv.path. Several of these may share a job
(parallel.data: N): each takes every Nth row. docs/stock_client.md goes through the steps, which are marked here with
their numbers.
"""
import argparse
import csv
import queue
import socket
import sys
import threading
import time

import grpc
import numpy as np

from sluice.v1 import parameter_pb2 as ps
from sluice.v1 import parameter_pb2_grpc as ps_grpc
from sluice.v1 import plan_pb2, scheduler_pb2, scheduler_pb2_grpc

PROTOCOL_VERSION = 2  # common/version.h
FRAME_BYTES = 1 << 20
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


# ------------------------------------------------------------ the model: any function of parameters and rows will do
class Softmax:
    def __init__(self, data, rank, ranks):
        """`data`: JobSpec.data.csv, whose schema `sluice submit` filled in. Rows rank, rank + ranks, ..."""
        self.train = self._read(data.path, data, rank, ranks)
        self.validation = self._read(data.validation_path, data, rank, ranks)
        self.rows = sum(1 for _ in self._lines(data.path))

    @staticmethod
    def _lines(path):
        with open(path, newline="", encoding="utf-8-sig") as file:
            yield from csv.DictReader(file)

    def _read(self, path, data, rank, ranks):
        schema, rows = data.schema, list(self._lines(path))[rank::ranks]
        x = np.array([[float(row[name]) for name in schema.features] for row in rows]).reshape(-1, len(schema.features))
        if schema.mean:
            x = (x - np.array(schema.mean)) / np.array(schema.deviation)
        classes = np.array([list(schema.labels).index(row[data.label].strip()) for row in rows], dtype=int)
        return x.astype(np.float32), np.eye(len(schema.labels), dtype=np.float32)[classes]

    @staticmethod
    def evaluate(tensors, rows):
        """(probabilities - targets, sum of losses, number of rows classified right)"""
        x, target = rows
        logits = x @ tensors["weight"].T + tensors["bias"]
        logits -= logits.max(axis=1, keepdims=True)
        probability = np.exp(logits)
        probability /= probability.sum(axis=1, keepdims=True)
        loss = -np.log((probability * target).sum(axis=1)).sum(dtype=np.float64)
        right = (probability.argmax(axis=1) == target.argmax(axis=1)).sum()
        return probability - target, float(loss), float(right)

    def gradient(self, tensors):
        """Of the SUM of the losses: servers divide by the number of rows of all workers."""
        error, loss, right = self.evaluate(tensors, self.train)
        return {"weight": error.T @ self.train[0], "bias": error.sum(axis=0)}, loss, right


# -------------------------------------------------------------- what arrives: all of it goes into one queue of events
class Session:
    """The stream to the scheduler: registers, sends heartbeats, turns what comes into events ("scheduler", message)."""

    def __init__(self, scheduler, name, events):
        self.node = plan_pb2.NodeId(name=name, incarnation=time.time_ns())
        self.events, self.outgoing, self.heartbeat = events, queue.SimpleQueue(), 0.5
        register = scheduler_pb2.Register(protocol_version=PROTOCOL_VERSION, role=scheduler_pb2.WORKER, node=self.node,
                                          host_id=socket.gethostname(), address=name, numeric_profile="numpy")
        self.outgoing.put(scheduler_pb2.NodeMessage(register=register))
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(grpc.insecure_channel(scheduler, OPTIONS))
        threading.Thread(target=self._receive, daemon=True).start()

    def _send(self):
        while True:
            try:
                yield self.outgoing.get(timeout=self.heartbeat)
            except queue.Empty:
                yield scheduler_pb2.NodeMessage(heartbeat=scheduler_pb2.Heartbeat())

    def _receive(self):
        try:
            for message in self.stub.Session(self._send(), wait_for_ready=True):
                if message.HasField("welcome"):
                    self.heartbeat = message.welcome.lease_ms / 3000
                self.events.put(("scheduler", message))
            self.events.put(("lost", "the scheduler ended the session"))
        except grpc.RpcError as error:
            self.events.put(("lost", error.details()))


class Stream:
    """The data stream to one server. Events: ("frame", stream, frame), at its end ("end", stream, code, text)."""

    def __init__(self, address, events):
        self.address, self.events, self.outgoing, self.call = address, events, queue.SimpleQueue(), None
        self.stub = ps_grpc.ParameterServiceStub(grpc.insecure_channel(address, OPTIONS))

    def open(self):
        self.outgoing = queue.SimpleQueue()
        self.call = self.stub.Stream(iter(self.outgoing.get, None), wait_for_ready=True)
        threading.Thread(target=self._receive, args=(self.call,), daemon=True).start()

    def _receive(self, call):
        try:
            for frame in call:
                self.events.put(("frame", self, frame))
            self.events.put(("end", self, grpc.StatusCode.OK, ""))
        except grpc.RpcError as error:
            self.events.put(("end", self, error.code(), error.details()))

    def close(self):
        self.outgoing.put(None)
        if self.call is not None:
            self.call.cancel()


class Over(Exception):
    """A generation has ended; `plan` is the next one, None at the job's end."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan


# ---------------------------------------------------------------- one generation of a job
class Generation:
    def __init__(self, plan, node, events):
        self.plan, self.events, self.spec = plan, events, plan.spec
        self.rank = next(i for i, rank in enumerate(plan.ranks) if rank.node == node)
        self.hello = ps.StreamHello(protocol_version=PROTOCOL_VERSION, job_id=plan.job_id, node=node,
                                    contributor=self.rank, generation=plan.generation)
        holder = plan.chains[0].members[0].address  # hears the reports
        self.streams = {holder: Stream(holder, events)}
        self.holder = self.streams[holder]
        self.model = Softmax(self.spec.data.csv, self.rank, len(plan.ranks))
        if self.spec.train.batch != self.model.rows:
            sys.exit("stock_client: train.batch is %d, %s has %d rows; this example takes all rows every round" %
                     (self.spec.train.batch, self.spec.data.csv.path, self.model.rows))

    def heed(self, kind, message):
        """What the scheduler says: a new plan or the job's end is the end of this generation."""
        if kind == "lost":
            sys.exit("stock_client: no session with the scheduler: " + message)
        if message.HasField("plan") and message.plan.job_id == self.plan.job_id:
            if message.plan.generation > self.plan.generation:
                raise Over(message.plan)
        if message.HasField("end_job") and message.end_job.job_id == self.plan.job_id:
            raise Over(None)

    def ask(self, question):
        """question() until it has an answer: a plan reaches servers and workers at about the same time, servers die."""
        while True:
            try:
                answer = question()
                if answer is not None:
                    return answer
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED,
                                        grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OUT_OF_RANGE):
                    raise
            try:
                kind, *event = self.events.get(timeout=0.05)
                if kind in ("scheduler", "lost"):
                    self.heed(kind, event[0])
            except queue.Empty:
                pass

    def get_plan(self):  # 2
        layout = self.holder.stub.GetPlan(ps.GetPlanRequest(job_id=self.plan.job_id), timeout=5)
        return layout if layout.plan.generation == self.plan.generation else None

    def pull(self, version):  # 3
        """All parameters at one version, as one row of float32; None where a server has not got the plan yet."""
        values = np.empty(sum(chunk.elements for chunk in self.chunks), dtype=np.float32)
        for stream in self.streams.values():
            for frame in stream.stub.Pull(ps.PullRequest(job_id=self.plan.job_id, version=version), timeout=5):
                for header, part in self.split(frame):
                    if header.generation != self.plan.generation:
                        return None
                    self.place(values, header.chunk, part)
        return values

    @staticmethod
    def split(frame):
        """A frame's payload holds its chunks' values one after the other, little-endian float32."""
        offset = 0
        for header in frame.header:
            yield header, np.frombuffer(frame.payload, dtype="<f4", count=header.elements, offset=offset)
            offset += 4 * header.elements

    def place(self, values, chunk, part):
        begin = self.chunks[chunk].offset
        values[begin:begin + len(part)] = part

    def views(self, values):
        """{name: array} of the tensors within one row of values."""
        return {t.name: values[t.offset:t.offset + int(np.prod(t.shape))].reshape(t.shape) for t in self.tensors}

    def connect(self, stream):  # 4
        stream.open()
        want = [ps.Want(first_chunk=i, chunks=1, version=self.round + 1 + self.done[i])
                for i, chunk in enumerate(self.chunks) if chunk.address == stream.address]
        subscribe = ps.Subscribe(generation=self.plan.generation, wants=want)
        stream.outgoing.put(ps.ChunkFrame(hello=self.hello, subscribe=subscribe))
        self.push(stream)  # what was lost with the last connection; a second copy is dropped by the server

    def report(self, kind, version, loss, right, rows):
        report = ps.RoundReport(generation=self.plan.generation, round=version, contributor=self.rank, kind=kind,
                                loss_sum=loss, count=len(rows[0]), correct=right)
        self.reports.append(report)
        self.holder.outgoing.put(ps.ChunkFrame(report=report))

    def push(self, stream):  # 5
        """The round's gradient, as far as it is this server's."""
        if stream is self.holder:
            for report in self.reports:
                stream.outgoing.put(ps.ChunkFrame(report=report))
        if self.gradient is not None:
            self.push_chunks(stream, [i for i, chunk in enumerate(self.chunks)
                                      if chunk.address == stream.address and not self.done[i]])

    def push_chunks(self, stream, chunks):
        frame = ps.ChunkFrame()
        for i in chunks:
            chunk = self.chunks[i]
            part = self.gradient[chunk.offset:chunk.offset + chunk.elements]
            frame.header.add(chunk=i, generation=self.plan.generation, round=self.round, contributor=self.rank,
                             elements=chunk.elements, encoding=ps.F32, count=len(self.model.train[0]))
            frame.payload += part.astype("<f4").tobytes()
            if len(frame.payload) >= FRAME_BYTES:
                stream.outgoing.put(frame)
                frame = ps.ChunkFrame()
        if frame.header:
            stream.outgoing.put(frame)

    def run(self):
        """Trains from the plan's version to the last, until Over."""
        layout = self.ask(self.get_plan)
        self.tensors, self.chunks = layout.tensors, layout.chunks
        for chunk in self.chunks:
            if chunk.address not in self.streams:
                self.streams[chunk.address] = Stream(chunk.address, self.events)
        values = self.ask(lambda: self.pull(self.plan.start))
        self.round, self.gradient, self.reports = self.plan.start, None, []
        self.done = [False] * len(self.chunks)  # at version round + 1
        for stream in self.streams.values():
            self.connect(stream)
        rounds, every = self.spec.train.rounds, self.spec.train.eval_every
        while True:
            if self.round > 0 and (self.round == rounds or every > 0 and self.round % every == 0):
                _, loss, right = self.model.evaluate(self.views(values), self.model.validation)
                self.report(ps.RoundReport.EVALUATION, self.round, loss, right, self.model.validation)
                print("version %d: loss %.6f, accuracy %.4f" % (self.round, loss / len(self.model.validation[0]),
                                                                right / len(self.model.validation[0])), flush=True)
            if self.round < rounds:
                parts, loss, right = self.model.gradient(self.views(values))
                self.gradient = np.empty_like(values)
                for name, view in self.views(self.gradient).items():
                    view[...] = parts[name]
                self.report(ps.RoundReport.TRAIN, self.round, loss, right, self.model.train)
                self.reports = self.reports[-2:]  # older ones cannot have been lost: a later round was committed
                for stream in self.streams.values():
                    self.push(stream)
            self.wait(values)
            self.round, self.gradient, self.done = self.round + 1, None, [False] * len(self.chunks)

    def wait(self, values):  # 6
        """Takes commits until all chunks are at round + 1."""
        while not all(self.done):
            kind, *event = self.events.get()
            if kind in ("scheduler", "lost"):
                self.heed(kind, event[0])
            elif event[0] not in self.streams.values():
                pass  # of an older generation
            elif kind == "frame":
                for name in event[1].later.again:  # the server had no room for it before
                    if name.round == self.round and not self.done[name.chunk]:
                        self.push_chunks(event[0], [name.chunk])
                for header, part in self.split(event[1]):
                    if header.round == self.round + 1 and header.generation == self.plan.generation:
                        self.place(values, header.chunk, part)
                        self.done[header.chunk] = True
            elif event[1] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                time.sleep(0.1)
                self.connect(event[0])  # a connection that broke loses nothing
            elif event[1] not in (grpc.StatusCode.OK, grpc.StatusCode.ABORTED):  # then the next plan or the end comes
                sys.exit("stock_client: %s refused: %s: %s" % (event[0].address, event[1].name, event[2]))

    def close(self):
        for stream in self.streams.values():
            stream.close()


def main():
    parser = argparse.ArgumentParser(description="A worker in Python: softmax regression over a CSV table.")
    parser.add_argument("--scheduler", default="127.0.0.1:7700", help="HOST:PORT")
    parser.add_argument("--name", default="stock-client", help="of its own for every process")
    args = parser.parse_args()
    events = queue.Queue()
    session = Session(args.scheduler, args.name, events)  # 1
    plan = None
    while plan is None:
        kind, event = events.get()
        if kind == "lost":
            sys.exit("stock_client: no session with the scheduler: " + event)
        if event.HasField("welcome"):
            print("registered with %s as %s" % (args.scheduler, args.name), flush=True)
        if event.HasField("plan") and any(rank.node == session.node for rank in event.plan.ranks):
            plan = event.plan
    job = plan.job_id
    while plan is not None:
        generation = Generation(plan, session.node, events)
        try:
            print("job %s generation %d: rank %d of %d, from version %d" %
                  (job, plan.generation, generation.rank, len(plan.ranks), plan.start), flush=True)
            generation.run()
        except Over as over:
            plan = over.plan
        finally:
            generation.close()
    status = session.stub.GetJob(scheduler_pb2.GetJobRequest(job_id=job))
    print("job %s: %s" % (job, scheduler_pb2.JobState.Name(status.state).lower()), flush=True)
    sys.exit(0 if status.state == scheduler_pb2.SUCCEEDED else 1)


if __name__ == "__main__":
    main()
