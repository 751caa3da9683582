#include "bench/round_trip.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "bench/blaster.h"
#include "bench/parameter_job.h"
#include "bench/parameter_server.h"
#include "bench/parameter_worker.h"
#include "bench/stream_alone.h"
#include "bench/transfer_nodes.h"
#include "common/grpc_transport.h"
#include "common/rpc.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr size_t kFloats = kTripBytes / sizeof(float);
constexpr int kCounts[] = {1, kManyTrips};
constexpr bool kDisciplines[] = {false, true};  // by verdict

struct Ports {
  int echo = 0, stream[2] = {}, server[2][2] = {};  // by count; by discipline and count
};

ParameterJob Job(int count, bool verdict) {
  ParameterJob job;
  job.elements = static_cast<uint64_t>(count) * kFloats;
  job.chunk_elements = kFloats;
  job.verdict = verdict;
  return job;
}

TransferShape Shape(int count) {
  return {.bytes = static_cast<size_t>(count) * kTripBytes, .chunk_bytes = kTripBytes, .window_bytes = 1 << 20};
}

std::string Address(int port) { return HostPort{"127.0.0.1", port}.ToString(); }

}  // namespace

struct RoundTrips::Command {
  TripPath path;
  int many;
  double seconds;
};

struct RoundTrips::Reply {
  double seconds = 0, messages = 0;
  bool ok = true;
  char message[256] = {};
};

// ---------------------------------------------------------------- the serving process
absl::Status RoundTrips::Serve(const Pipes& pipes) {
  Ports ports;
  ASSIGN_OR_RETURN(const auto echo, EchoServer::Start(kTripBytes));
  ports.echo = echo->port();
  std::vector<std::unique_ptr<StreamAloneService>> services;
  std::vector<std::unique_ptr<GrpcServer>> listeners;
  std::vector<std::unique_ptr<BenchServer>> servers;
  for (int many = 0; many < 2; ++many) {
    services.push_back(std::make_unique<StreamAloneService>(Shape(kCounts[many])));
    ASSIGN_OR_RETURN(auto listener, GrpcServer::Start({}, {services.back().get()}));
    ports.stream[many] = listener->port();
    listeners.push_back(std::move(listener));
    for (const bool verdict : kDisciplines) {
      ASSIGN_OR_RETURN(auto server, BenchServer::Listen());
      ports.server[verdict][many] = server->port();
      ASSIGN_OR_RETURN(const auto layout, MakeBenchLayout(Job(kCounts[many], verdict), {Address(server->port())}));
      RETURN_IF_ERROR(server->Serve(layout, BenchNode("server", 0), /*shared_memory=*/false, nullptr));
      servers.push_back(std::move(server));
    }
  }
  RETURN_IF_ERROR(WriteAll(pipes.report, &ports, sizeof(ports)));
  char byte;
  ReadUnlessEnded(pipes.control, &byte, 1);
  return absl::OkStatus();
}

// ---------------------------------------------------------------- the working process
class RoundTrips::Working {
 public:
  absl::Status Connect(const Ports& ports) {
    ASSIGN_OR_RETURN(echo_, Echo::Connect(ports.echo, kTripBytes));
    for (int many = 0; many < 2; ++many) {
      Stream& stream = streams_[many];
      const TransferShape shape = Shape(kCounts[many]);
      stream.sent = std::make_shared<std::vector<float>>(shape.bytes / sizeof(float));
      stream.pulled = std::make_shared<std::vector<float>>(stream.sent->size());
      stream.end = std::make_unique<StreamAlone>(shape, &transport_, Address(ports.stream[many]), stream.pulled);
      for (const bool verdict : kDisciplines) {
        Server& server = servers_[verdict][many];
        const ParameterJob job = Job(kCounts[many], verdict);
        ASSIGN_OR_RETURN(const auto layout, MakeBenchLayout(job, {Address(ports.server[verdict][many])}));
        server.expected = std::make_unique<ExpectedParameters>(job, *layout);
        ASSIGN_OR_RETURN(server.worker, BenchWorker::Open(job, 0, layout, &transport_));
        RETURN_IF_ERROR(server.worker->AwaitInitial());
        server.gradients.resize(1, std::vector<float>(job.elements));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Do(const Command& command, Reply* reply) {
    ++number_;
    Server& server = servers_[command.path == TripPath::kVerdict][command.many];
    Stream& stream = streams_[command.many];
    const bool by_server = command.path != TripPath::kTcp && command.path != TripPath::kStream;
    if (by_server) {
      FillBenchGradient(number_, 0, &server.gradients[0]);
      std::copy(server.gradients[0].begin(), server.gradients[0].end(), server.worker->gradient());
    }
    FillBenchGradient(number_, 0, stream.sent.get());
    const int count = kCounts[command.many];
    uint64_t rounds = 0;
    absl::Duration taken;
    const absl::Time start = absl::Now();
    absl::Time now = start;
    for (; absl::ToDoubleSeconds(now - start) < command.seconds; now = absl::Now()) {
      for (int i = 0; i < 16; ++i, ++rounds) {  // the clock costs something, too
        if (by_server) {
          ASSIGN_OR_RETURN(const BenchWorker::Times times,
                           server.worker->Round(server.rounds++, /*frames_apart=*/true));
          taken += times.taken - times.start;
        } else if (command.path == TripPath::kStream) {
          RETURN_IF_ERROR(stream.end->Push(stream.sent, ++stream.round));
        } else {
          RETURN_IF_ERROR(echo_->Trips(count));
        }
      }
    }
    reply->seconds = absl::ToDoubleSeconds(command.path == TripPath::kTaken ? taken : now - start);
    reply->messages = static_cast<double>(rounds) * count;
    if (by_server) {
      server.expected->Apply(server.gradients, rounds);
      return server.expected->Compare(server.worker->parameters());
    }
    if (command.path != TripPath::kStream) return absl::OkStatus();  // compared message by message
    RETURN_IF_ERROR(stream.end->Pull(++stream.round));
    return *stream.pulled == *stream.sent ? absl::OkStatus() : absl::DataLossError("stream: other values came back");
  }

 private:
  struct Stream {
    SharedValues sent, pulled;
    std::unique_ptr<StreamAlone> end;
    uint64_t round = 0;
  };
  struct Server {
    std::unique_ptr<ExpectedParameters> expected;
    std::unique_ptr<BenchWorker> worker;
    std::vector<std::vector<float>> gradients;
    uint64_t rounds = 0;
  };

  GrpcTransport transport_;
  std::unique_ptr<Echo> echo_;
  Stream streams_[2];
  Server servers_[2][2];
  uint64_t number_ = 0;
};

absl::Status RoundTrips::Work(const Pipes& pipes) {
  Ports ports;
  RETURN_IF_ERROR(ReadAll(pipes.control, &ports, sizeof(ports)));
  Working working;
  RETURN_IF_ERROR(working.Connect(ports));
  for (Command command; ReadUnlessEnded(pipes.control, &command, sizeof(command));) {
    Reply reply;
    const absl::Status status = working.Do(command, &reply);
    reply.ok = status.ok();
    std::strncpy(reply.message, std::string(status.message()).c_str(), sizeof(reply.message) - 1);
    RETURN_IF_ERROR(WriteAll(pipes.report, &reply, sizeof(reply)));
    RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- the measuring process
absl::StatusOr<std::unique_ptr<RoundTrips>> RoundTrips::Start() {
  auto trips = std::make_unique<RoundTrips>();
  RETURN_IF_ERROR(trips->processes_.Fork([](const Pipes& pipes) {
    PinServer(0);
    return Serve(pipes);
  }));
  RETURN_IF_ERROR(trips->processes_.Fork([](const Pipes& pipes) {
    PinWorker(0);
    return Work(pipes);
  }));
  Ports ports;
  RETURN_IF_ERROR(ReadAll(trips->processes_.pipes(0).report, &ports, sizeof(ports)));
  RETURN_IF_ERROR(WriteAll(trips->processes_.pipes(1).control, &ports, sizeof(ports)));
  return trips;
}

absl::StatusOr<double> RoundTrips::Measure(TripPath path, bool many, double seconds) {
  const Command command = {path, many ? 1 : 0, seconds};
  RETURN_IF_ERROR(WriteAll(processes_.pipes(1).control, &command, sizeof(command)));
  Reply reply;
  RETURN_IF_ERROR(ReadAll(processes_.pipes(1).report, &reply, sizeof(reply)));
  if (!reply.ok) return absl::DataLossError(absl::StrCat("round trips: ", reply.message));
  return reply.seconds / reply.messages;
}

}  // namespace sluice
