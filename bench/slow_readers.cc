// Clients that hardly read: N data streams of one job to one server, each on a connection of its own, which subscribe
// to everything and then read so many bytes a second; and M calls of Pull that read nothing. What they cost the server
// is measured from outside (scripts/accept/data_path_memory.py).
//
//   bench_slow_readers --server=HOST:PORT --job=JOB --streams=N [--pulls=M] --bytes_per_second=B --seconds=S
//
// A stream that would have to wait for more than a second before it may read the next frame is given up then, and
// opened again: the server will have ended it (it is two versions behind), and would hold nothing for it any more.
// Prints one line of JSON (`starved`: streams that never had a value); exit code 1 where no stream had one.
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "common/args.h"
#include "common/version.h"
#include "sluice/v1/parameter.grpc.pb.h"

namespace sluice {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(1);

std::unique_ptr<v1::ParameterService::Stub> OwnConnection(const std::string& server) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::ParameterService::NewStub(
      grpc::CreateCustomChannel(server, grpc::InsecureChannelCredentials(), arguments));
}

class SlowReaders {
 public:
  SlowReaders(std::string server, std::string job, double bytes_per_second, absl::Time until)
      : server_(std::move(server)), job_(std::move(job)), bytes_per_second_(bytes_per_second), until_(until) {}

  void ReadStreams() {
    const auto stub = OwnConnection(server_);
    bool served = false;
    while (!Over()) served |= ReadOne(*stub);
    if (!served) ++starved_;
  }

  // A call whose answers stay in the server.
  void LeavePullUnread() {
    const auto stub = OwnConnection(server_);
    grpc::ClientContext context;
    v1::PullRequest request;
    request.set_job_id(job_);
    const auto reader = stub->Pull(&context, request);
    Wait(until_);
    context.TryCancel();
  }

  void Print(int streams, int pulls) const {
    std::printf(
        "{\"streams\": %d, \"pulls\": %d, \"opened\": %ld, \"frames\": %ld, \"bytes\": %ld, \"starved\": %ld}\n",
        streams, pulls, opened_.load(), frames_.load(), bytes_.load(), starved_.load());
  }
  int64_t starved() const { return starved_.load(); }

 private:
  bool Over() const { return absl::Now() >= until_; }
  static void Wait(absl::Time until) {
    absl::SleepFor(until - absl::Now());  // the pace of a slow reader is a matter of time
  }

  // One stream until it ends. Whether a frame with values came.
  bool ReadOne(v1::ParameterService::Stub& stub) {
    v1::GetPlanRequest ask;
    ask.set_job_id(job_);
    v1::GetPlanResponse plan;
    v1::PullRequest newest;
    newest.set_job_id(job_);
    newest.set_chunks(1);
    v1::ChunkFrame frame;
    {
      grpc::ClientContext get, pull;
      if (!stub.GetPlan(&get, ask, &plan).ok()) return false;
      const auto reader = stub.Pull(&pull, newest);
      if (!reader->Read(&frame) || frame.header_size() == 0) return false;
      v1::ChunkFrame none;
      while (reader->Read(&none)) {
      }
      reader->Finish();
    }
    v1::ChunkFrame hello;
    hello.mutable_hello()->set_protocol_version(kProtocolVersion);
    hello.mutable_hello()->set_job_id(job_);
    hello.mutable_hello()->set_generation(plan.plan().generation());
    hello.mutable_subscribe()->set_generation(plan.plan().generation());
    v1::Want* const want = hello.mutable_subscribe()->add_wants();
    want->set_chunks(static_cast<uint64_t>(plan.chunks_size()));
    want->set_version(frame.header(0).round());
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(until_));
    const auto stream = stub.Stream(&context);
    ++opened_;
    bool served = false;
    if (stream->Write(hello)) {
      while (!Over() && stream->Read(&frame)) {
        ++frames_;
        bytes_ += static_cast<int64_t>(frame.payload().size());
        served |= frame.header_size() > 0;
        const absl::Duration pause = absl::Seconds(frame.payload().size() / bytes_per_second_);
        Wait(std::min(until_, absl::Now() + std::min(pause, kPatience)));
        if (pause > kPatience) break;
      }
    }
    context.TryCancel();
    return served;
  }

  const std::string server_, job_;
  const double bytes_per_second_;
  const absl::Time until_;
  std::atomic<int64_t> opened_{0}, frames_{0}, bytes_{0}, starved_{0};
};

int Main(int argc, char** argv) {
  const Command command{
      .name = "bench_slow_readers",
      .summary = "Clients that hardly read.",
      .flags = {{"server", FlagKind::kString, "HOST:PORT", "a sluice-server"},
                {"job", FlagKind::kString, "JOB", "the id of a job that runs there"},
                {"streams", FlagKind::kInteger, "N", "data streams", 0, false, 0, 10000},
                {"pulls", FlagKind::kInteger, "N", "calls of Pull that read nothing", 0, false, 0, 10000},
                {"bytes_per_second", FlagKind::kNumber, "B", "what each stream reads", 0, false, 1},
                {"seconds", FlagKind::kNumber, "S", "how long", 0, false, 0, 3600}},
      .program = true};
  const absl::StatusOr<Args> args = ParseArgs(command, {argv + 1, argv + argc});
  if (!args.ok()) {
    std::fprintf(stderr, "%s\n%s", std::string(args.status().message()).c_str(), CommandHelp(command).c_str());
    return 2;
  }
  const int streams = static_cast<int>(args->Integer("streams", 8)),
            pulls = static_cast<int>(args->Integer("pulls", 0));
  SlowReaders readers(args->String("server"), args->String("job"), args->Number("bytes_per_second", 1 << 20),
                      absl::Now() + absl::Seconds(args->Number("seconds", 10)));
  std::vector<std::thread> threads;
  for (int i = 0; i < streams; ++i) threads.emplace_back([&] { readers.ReadStreams(); });
  for (int i = 0; i < pulls; ++i) threads.emplace_back([&] { readers.LeavePullUnread(); });
  for (std::thread& thread : threads) thread.join();
  readers.Print(streams, pulls);
  return streams > 0 && readers.starved() == streams ? 1 : 0;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::Main(argc, argv); }
