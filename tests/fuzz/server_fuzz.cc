// libFuzzer: frames of one hostile worker, through a server's job (ServerJob::OnFrame, ShardCore): no crash, no read
// outside a frame, and as long as the other worker pushes nothing no chunk ever gets a new version (sync).
//
// Input: one byte of flags (1: hello comes before the plan; 2: the job is async; 4: STREAM discipline), then frames,
// each two bytes of length (little-endian) and so many bytes.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "common/clock.h"
#include "common/frame.h"
#include "common/log.h"
#include "server/server_job.h"
#include "tests/fuzz/fuzz_plan.h"

namespace sluice {
namespace {

class Nowhere : public ByteStream {
 public:
  explicit Nowhere(bool async) : async_(async) {}
  void Write(grpc::ByteBuffer message) override {
    const absl::StatusOr<ParsedFrame> frame = ParseFrame(std::move(message));
    CHECK(frame.ok(), "the server writes what it would not read: {}", frame.status().ToString());
    for (const v1::ChunkHeader& header : frame->control.header()) {
      CHECK(async_ || header.round() == 0, "chunk {} moved without its second worker", header.chunk());
    }
  }
  size_t queued_bytes() const override { return 0; }
  void Close(const absl::Status&) override {}

 private:
  const bool async_;  // each contribution is applied alone
};

void Run(uint8_t flags, const uint8_t* data, size_t size) {
  static Lanes lanes(0), background(0);  // no thread: a failing input fails again
  static RealClock clock;
  static std::map<std::pair<bool, bool>, std::shared_ptr<const Layout>> layouts;
  const FuzzPlan plan{.async = (flags & 2) != 0, .stream = (flags & 4) != 0};
  std::shared_ptr<const Layout>& layout = layouts[{plan.async, plan.stream}];
  if (layout == nullptr) layout = plan.Make();
  auto job = std::make_shared<ServerJob>(ServerJobOptions{.job_id = layout->plan().job_id(),
                                                          .self = FuzzNode("server"),
                                                          .checkpoint_root = {},
                                                          .data_root = {},
                                                          .rules = {},
                                                          .lanes = &lanes,
                                                          .background = &background,
                                                          .transport = nullptr,
                                                          .clock = &clock,
                                                          .to_scheduler = [](const v1::NodeMessage&) {}});
  const bool parked = (flags & 1) != 0;
  if (!parked) job->OnPlan(layout);
  CHECK(
      job->AddStream(1, std::make_shared<Nowhere>(plan.async), std::make_shared<SharedFrames>(), FuzzHello(*layout, 0))
          .ok());
  CHECK(
      job->AddStream(2, std::make_shared<Nowhere>(plan.async), std::make_shared<SharedFrames>(), FuzzHello(*layout, 1))
          .ok());
  ParsedFrame subscribe;  // the other worker hears of every version
  subscribe.control.mutable_subscribe()->set_generation(1);
  subscribe.control.mutable_subscribe()->add_wants()->set_chunks(layout->table().chunks());
  CHECK(job->OnFrame(2, subscribe).ok());
  bool open = true;
  while (open && size >= 2) {
    const size_t length = std::min<size_t>(data[0] | data[1] << 8, size - 2);
    const grpc::Slice slice(data + 2, length);
    data += 2 + length;
    size -= 2 + length;
    absl::StatusOr<ParsedFrame> frame = ParseFrame(grpc::ByteBuffer(&slice, 1));
    open = frame.ok() && job->OnFrame(1, *std::move(frame)).ok();
  }
  if (parked) job->OnPlan(layout);
  lanes.Drain();
  job->RemoveStream(1);
  job->RemoveStream(2);
  job->End();
  job = nullptr;
  lanes.Drain();
  background.Drain();
}

}  // namespace
}  // namespace sluice

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  spdlog::set_level(spdlog::level::critical);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 0) sluice::Run(data[0], data + 1, size - 1);
  return 0;
}
