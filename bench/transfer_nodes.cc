#include "bench/transfer_nodes.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "bench/blaster.h"
#include "bench/measure.h"
#include "bench/parameter_server.h"
#include "bench/parameter_worker.h"
#include "bench/stream_alone.h"
#include "common/grpc_transport.h"
#include "common/rpc.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr uint32_t kMaxWorkers = 2;

int Cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  return CPU_COUNT(&allowed);
}

struct Ports {  // of one server
  int place[kMaxWorkers] = {}, plain = 0, server = 0, shared = 0, alone = 0;
};

bool SharesMemory(const ParameterJob& job) {
  return job.push == "f32" && job.pull == "f32" && job.server_places.empty();
}

TransferShape Shape(const ParameterJob& job) { return {job.bytes(), job.chunk_elements * sizeof(float), job.window}; }

std::string ServerHost(const ParameterJob& job, size_t server) {
  return job.server_places.empty() ? "127.0.0.1" : job.server_places.at(server).host;
}

std::vector<std::string> Addresses(const ParameterJob& job, const std::vector<Ports>& all, int Ports::*port) {
  std::vector<std::string> addresses;
  for (size_t i = 0; i < all.size(); ++i) addresses.push_back(HostPort{ServerHost(job, i), all[i].*port}.ToString());
  return addresses;
}

double Seconds(absl::Time time) { return absl::ToDoubleSeconds(time - absl::UnixEpoch()); }

}  // namespace

bool PinWorker(uint32_t number) {
  const int mine = Cores() / 2;
  return mine > 0 && PinToCore(static_cast<int>(number) % mine);
}

bool PinServer(uint32_t number) {
  const int cores = Cores(), others = cores / 2;
  return others > 0 && PinToCore(others + static_cast<int>(number) % (cores - others));
}

struct TransferNodes::Command {
  enum What { kGradient, kPush, kPull, kRound, kVerify, kCpu } what;
  TransferPath path = TransferPath::kPlace;
  uint64_t number = 0;
};

struct TransferNodes::Reply {
  double start = 0, middle = 0, end = 0, taken = 0;  // seconds since the epoch; of a push or pull start and end
  double cpu = 0;                                    // seconds so far
  bool ok = true;
  char message[256] = {};
};

// ---------------------------------------------------------------- a serving process
absl::Status TransferNodes::Serve(const ParameterJob& job, bool all_paths, uint32_t number, const Pipes& pipes) {
  Ports mine;
  std::vector<std::unique_ptr<BlasterServer>> blasters;
  for (uint32_t worker = 0; worker < job.workers; ++worker) {
    ASSIGN_OR_RETURN(auto blaster, BlasterServer::Start(job.bytes() / job.servers, ServerHost(job, number)));
    mine.place[worker] = blaster->port();
    blasters.push_back(std::move(blaster));
  }
  ASSIGN_OR_RETURN(const auto server, BenchServer::Listen(ServerHost(job, number)));
  ASSIGN_OR_RETURN(const auto shared, BenchServer::Listen(ServerHost(job, number)));
  mine.server = server->port();
  mine.shared = shared->port();
  std::unique_ptr<StreamAloneService> alone;
  std::unique_ptr<GrpcServer> listener;
  if (all_paths) {
    ASSIGN_OR_RETURN(auto plain, BlasterServer::Start(job.bytes()));
    mine.plain = plain->port();
    blasters.push_back(std::move(plain));
    alone = std::make_unique<StreamAloneService>(Shape(job));
    ASSIGN_OR_RETURN(listener, GrpcServer::Start({}, {alone.get()}));
    mine.alone = listener->port();
  }
  RETURN_IF_ERROR(WriteAll(pipes.report, &mine, sizeof(mine)));
  std::vector<Ports> all(job.servers);
  RETURN_IF_ERROR(ReadAll(pipes.control, all.data(), all.size() * sizeof(Ports)));
  const v1::NodeId node = BenchNode("server", number);
  ASSIGN_OR_RETURN(auto layout, MakeBenchLayout(job, Addresses(job, all, &Ports::server)));
  RETURN_IF_ERROR(server->Serve(layout, node, /*shared_memory=*/false, nullptr));
  if (SharesMemory(job)) {
    ASSIGN_OR_RETURN(layout, MakeBenchLayout(job, Addresses(job, all, &Ports::shared)));
    RETURN_IF_ERROR(shared->Serve(layout, node, /*shared_memory=*/true, nullptr));
  }
  // Said once when it serves; then each byte asks for it. The pipe's end ends this process.
  char asked;
  do {
    const double cpu = CpuSeconds();
    RETURN_IF_ERROR(WriteAll(pipes.report, &cpu, sizeof(cpu)));
  } while (ReadUnlessEnded(pipes.control, &asked, 1));
  return absl::OkStatus();
}

// ---------------------------------------------------------------- a working process
class TransferNodes::Working {
 public:
  Working(const ParameterJob& job, bool all_paths, uint32_t number)
      : job_(job), all_paths_(all_paths), number_(number), gradients_(job.workers) {
    for (std::vector<float>& gradient : gradients_) gradient.resize(job.elements);
  }

  absl::Status Connect(const std::vector<Ports>& all) {
    const size_t part = job_.bytes() / job_.servers;
    for (size_t i = 0; i < all.size(); ++i) {
      ASSIGN_OR_RETURN(auto blaster, Blaster::Connect(all[i].place[number_], part, ServerHost(job_, i)));
      blasters_.push_back(std::move(blaster));
    }
    RETURN_IF_ERROR(Open(&server_, Addresses(job_, all, &Ports::server), false));
    if (SharesMemory(job_)) RETURN_IF_ERROR(Open(&shared_, Addresses(job_, all, &Ports::shared), true));
    if (all_paths_) {
      ASSIGN_OR_RETURN(plain_, Blaster::Connect(all[0].plain, job_.bytes()));
      alone_ = std::make_unique<StreamAlone>(Shape(job_), &transport_, Addresses(job_, all, &Ports::alone)[0], pulled_);
    }
    return absl::OkStatus();
  }

  absl::Status Do(const Command& command, Reply* reply) {
    switch (command.what) {
      case Command::kGradient:
        for (uint32_t w = 0; w < job_.workers; ++w) FillBenchGradient(command.number, w, &gradients_[w]);
        std::copy(gradients_[number_].begin(), gradients_[number_].end(), gradient_->begin());
        for (Job* job : {&server_, &shared_}) {
          if (job->worker != nullptr) std::copy(gradient_->begin(), gradient_->end(), job->worker->gradient());
        }
        return absl::OkStatus();
      case Command::kPush:
      case Command::kPull: {
        const bool push = command.what == Command::kPush;
        // What a pull brings must be seen to come.
        if (push) std::fill(pulled_->begin(), pulled_->end(), -1.0f);
        reply->start = Seconds(absl::Now());
        RETURN_IF_ERROR(Move(command.path, push));
        reply->end = Seconds(absl::Now());
        return absl::OkStatus();
      }
      case Command::kRound: {
        Job& job = command.path == TransferPath::kShared ? shared_ : server_;
        ASSIGN_OR_RETURN(const BenchWorker::Times times, job.worker->Round(job.rounds));
        ++job.rounds;
        reply->start = Seconds(times.start);
        reply->middle = Seconds(times.first);
        reply->end = Seconds(times.last);
        reply->taken = Seconds(times.taken);
        return absl::OkStatus();
      }
      case Command::kVerify:
        return Verify(command.path);
      case Command::kCpu:
        return absl::OkStatus();
    }
    return absl::InternalError("no such command");
  }

 private:
  struct Job {
    std::unique_ptr<ExpectedParameters> expected;
    std::unique_ptr<BenchWorker> worker;
    uint64_t rounds = 0, verified = 0;
  };

  absl::Status Open(Job* job, const std::vector<std::string>& servers, bool shared_memory) {
    ParameterJob shape = job_;
    shape.shared_memory = shared_memory;
    ASSIGN_OR_RETURN(const auto layout, MakeBenchLayout(shape, servers));
    job->expected = std::make_unique<ExpectedParameters>(shape, *layout);
    ASSIGN_OR_RETURN(job->worker, BenchWorker::Open(shape, number_, layout, &transport_));
    RETURN_IF_ERROR(job->worker->AwaitInitial());
    return job->expected->Compare(job->worker->parameters());
  }

  absl::Status Move(TransferPath path, bool push) {
    switch (path) {
      case TransferPath::kHot:
        return push ? blasters_[0]->PushHot() : blasters_[0]->PullHot();
      case TransferPath::kPlain:
        return push ? plain_->PushPlain() : plain_->PullPlain();
      case TransferPath::kAlone:
        if (push) ++alone_round_;
        return push ? alone_->Push(gradient_, alone_round_) : alone_->Pull(alone_round_);
      default:
        break;
    }
    // A thread for each server's part.
    std::vector<absl::Status> ends(blasters_.size());
    const auto move = [&](size_t i) {
      const size_t first = gradient_->size() / blasters_.size() * i;
      ends[i] =
          push ? blasters_[i]->PushFrom(gradient_->data() + first) : blasters_[i]->PullInto(pulled_->data() + first);
    };
    std::vector<std::thread> threads;
    for (size_t i = 1; i < blasters_.size(); ++i) threads.emplace_back(move, i);
    move(0);
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& end : ends) RETURN_IF_ERROR(end);
    return absl::OkStatus();
  }

  absl::Status Verify(TransferPath path) {
    if (path == TransferPath::kHot || path == TransferPath::kPlain) return absl::OkStatus();  // nobody keeps what comes
    if (path == TransferPath::kServer || path == TransferPath::kShared) {
      Job& job = path == TransferPath::kShared ? shared_ : server_;
      job.expected->Apply(gradients_, job.rounds - job.verified);
      job.verified = job.rounds;
      return job.expected->Compare(job.worker->parameters());
    }
    for (size_t i = 0; i < gradient_->size(); ++i) {
      if ((*pulled_)[i] == (*gradient_)[i]) continue;
      return absl::DataLossError(absl::StrCat(path == TransferPath::kPlace ? "TCP into place" : "stream alone",
                                              ": element ", i, " is ", (*pulled_)[i], ", expected ", (*gradient_)[i]));
    }
    return absl::OkStatus();
  }

  const ParameterJob job_;
  const bool all_paths_;
  const uint32_t number_;
  std::vector<std::vector<float>> gradients_;  // by worker
  const SharedValues gradient_ = std::make_shared<std::vector<float>>(job_.elements);
  const SharedValues pulled_ = std::make_shared<std::vector<float>>(job_.elements);
  GrpcTransport transport_;
  std::vector<std::unique_ptr<Blaster>> blasters_;  // by server
  std::unique_ptr<Blaster> plain_;                  // SO_RCVLOWAT leaves its traces in a socket
  std::unique_ptr<StreamAlone> alone_;
  uint64_t alone_round_ = 0;
  Job server_, shared_;
};

absl::Status TransferNodes::Work(const ParameterJob& job, bool all_paths, uint32_t number, const Pipes& pipes) {
  std::vector<Ports> all(job.servers);
  RETURN_IF_ERROR(ReadAll(pipes.control, all.data(), all.size() * sizeof(Ports)));
  Working working(job, all_paths, number);
  absl::Status status = working.Connect(all);
  Command command = {.what = Command::kCpu};
  do {
    Reply reply;
    if (status.ok()) status = working.Do(command, &reply);
    reply.cpu = CpuSeconds();
    reply.ok = status.ok();
    std::strncpy(reply.message, std::string(status.message()).c_str(), sizeof(reply.message) - 1);
    RETURN_IF_ERROR(WriteAll(pipes.report, &reply, sizeof(reply)));
  } while (status.ok() && ReadUnlessEnded(pipes.control, &command, sizeof(command)));
  return status;
}

// ---------------------------------------------------------------- the measuring process
absl::StatusOr<std::unique_ptr<TransferNodes>> TransferNodes::Start(const ParameterJob& job, bool all_paths) {
  if (job.workers < 1 || job.workers > kMaxWorkers || job.servers < 1 || job.elements % (job.servers * 256) != 0 ||
      (all_paths && job.workers * job.servers != 1)) {
    return absl::InvalidArgumentError("1 or 2 workers, servers that the elements can be dealt to");
  }
  std::unique_ptr<TransferNodes> nodes(new TransferNodes(job, all_paths));
  RETURN_IF_ERROR(nodes->StartAll());
  return nodes;
}

absl::Status TransferNodes::StartAll() {
  pinned_ = Cores() >= 2;
  for (uint32_t i = 0; i < job_.servers; ++i) {
    RETURN_IF_ERROR(processes_.Fork([&](const Pipes& pipes) -> absl::Status {
      if (!job_.server_places.empty()) RETURN_IF_ERROR(EnterNetwork(job_.server_places.at(i)));
      PinServer(i);
      return Serve(job_, all_paths_, i, pipes);
    }));
  }
  for (uint32_t i = 0; i < job_.workers; ++i) {
    RETURN_IF_ERROR(processes_.Fork([&](const Pipes& pipes) -> absl::Status {
      if (!job_.worker_places.empty()) RETURN_IF_ERROR(EnterNetwork(job_.worker_places.at(i)));
      PinWorker(i);
      return Work(job_, all_paths_, i, pipes);
    }));
  }
  std::vector<Ports> all(job_.servers);
  for (uint32_t i = 0; i < job_.servers; ++i) {
    RETURN_IF_ERROR(ReadAll(processes_.pipes(i).report, &all[i], sizeof(Ports)));
  }
  for (uint32_t i = 0; i < job_.servers; ++i) {
    RETURN_IF_ERROR(WriteAll(processes_.pipes(i).control, all.data(), all.size() * sizeof(Ports)));
  }
  for (uint32_t i = 0; i < job_.servers; ++i) {
    double cpu = 0;
    RETURN_IF_ERROR(ReadAll(processes_.pipes(i).report, &cpu, sizeof(cpu)));
  }
  for (uint32_t i = 0; i < job_.workers; ++i) {
    const Pipes& pipes = processes_.pipes(job_.servers + i);
    RETURN_IF_ERROR(WriteAll(pipes.control, all.data(), all.size() * sizeof(Ports)));
  }
  for (uint32_t i = 0; i < job_.workers; ++i) {
    Reply reply;
    RETURN_IF_ERROR(ReadAll(processes_.pipes(job_.servers + i).report, &reply, sizeof(reply)));
    if (!reply.ok) return absl::DataLossError(reply.message);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TransferNodes::Reply>> TransferNodes::Ask(const Command& command) {
  for (uint32_t i = 0; i < job_.workers; ++i) {
    RETURN_IF_ERROR(WriteAll(processes_.pipes(job_.servers + i).control, &command, sizeof(command)));
  }
  std::vector<Reply> replies(job_.workers);
  for (uint32_t i = 0; i < job_.workers; ++i) {
    RETURN_IF_ERROR(ReadAll(processes_.pipes(job_.servers + i).report, &replies[i], sizeof(Reply)));
    if (!replies[i].ok) return absl::DataLossError(absl::StrCat("worker ", i, ": ", replies[i].message));
  }
  return replies;
}

absl::Status TransferNodes::SetGradient(uint64_t number) {
  return Ask({.what = Command::kGradient, .number = number}).status();
}

absl::Status TransferNodes::Verify(TransferPath path) { return Ask({.what = Command::kVerify, .path = path}).status(); }

absl::StatusOr<TransferSeconds> TransferNodes::Exchange(TransferPath path) {
  const auto least = [](const std::vector<Reply>& replies, double Reply::*field) {
    double found = replies[0].*field;
    for (const Reply& reply : replies) found = std::min(found, reply.*field);
    return found;
  };
  const auto most = [](const std::vector<Reply>& replies, double Reply::*field) {
    double found = replies[0].*field;
    for (const Reply& reply : replies) found = std::max(found, reply.*field);
    return found;
  };
  if (path == TransferPath::kServer || path == TransferPath::kShared) {
    ASSIGN_OR_RETURN(const auto replies, Ask({.what = Command::kRound, .path = path}));
    const double first = most(replies, &Reply::middle);
    return TransferSeconds{first - least(replies, &Reply::start), most(replies, &Reply::end) - first,
                           most(replies, &Reply::taken) - least(replies, &Reply::start)};
  }
  ASSIGN_OR_RETURN(const auto pushes, Ask({.what = Command::kPush, .path = path}));
  ASSIGN_OR_RETURN(const auto pulls, Ask({.what = Command::kPull, .path = path}));
  return TransferSeconds{most(pushes, &Reply::end) - least(pushes, &Reply::start),
                         most(pulls, &Reply::end) - least(pulls, &Reply::start)};
}

absl::StatusOr<double> TransferNodes::WorkerCpu() {
  ASSIGN_OR_RETURN(const auto replies, Ask({.what = Command::kCpu}));
  double sum = 0;
  for (const Reply& reply : replies) sum += reply.cpu;
  return sum;
}

absl::StatusOr<double> TransferNodes::ServerCpu() {
  double sum = 0;
  for (uint32_t i = 0; i < job_.servers; ++i) {
    RETURN_IF_ERROR(WriteAll(processes_.pipes(i).control, "c", 1));
    double cpu = 0;
    RETURN_IF_ERROR(ReadAll(processes_.pipes(i).report, &cpu, sizeof(cpu)));
    sum += cpu;
  }
  return sum;
}

}  // namespace sluice
