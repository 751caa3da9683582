// How fast a parameter space moves between two processes, beside what the socket itself can do in the same run.
//
//   bench_push_pull [--mib=64] [--chunk_kib=1024] [--window_mib=4] [--pairs=9] [--json]
//
// Two processes, each pinned to a core of its own. Each pair times four transfers of the same bytes, one after the
// other: TCP push, gRPC push, TCP pull, gRPC pull. TCP: send() and recv() of 1 MiB on one socket, the ceiling. gRPC:
// what daemons use, transport.h streams of frame.h frames, borrowed on the sending end, stored with one copy on the
// receiving one, with acknowledgements and a window. No server arithmetic: the receiver stores what it gets. After each
// pair the pulled values are compared with the pushed ones, element by element. Exit code 1: a value was wrong, or
// something failed.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/frame.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/rpc.h"
#include "nlohmann/json.hpp"
#include "sluice/v1/parameter.grpc.pb.h"

ABSL_FLAG(int, mib, 64, "MiB of float32 moved in each transfer");
ABSL_FLAG(int, chunk_kib, 1024, "KiB of a chunk, which is a frame of its own");
ABSL_FLAG(int, window_mib, 4, "MiB that may be under way unacknowledged");
ABSL_FLAG(int, pairs, 9, "timed pairs; two more warm up");
ABSL_FLAG(bool, json, false, "print JSON instead of a table");

namespace sluice {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(60);  // of one transfer
constexpr size_t kTcpPiece = 1 << 20;

struct Shape {
  size_t bytes;
  size_t chunk_bytes;
  size_t window_bytes;
  size_t chunks() const { return (bytes + chunk_bytes - 1) / chunk_bytes; }
  size_t size_of(size_t chunk) const { return std::min(chunk_bytes, bytes - chunk * chunk_bytes); }
};

using Values = std::shared_ptr<std::vector<float>>;

// The value of element i in a round: never the same in two rounds.
float Expected(size_t i, uint64_t round) {
  return static_cast<float>(i % 65536) * 0.25f + static_cast<float>(i / 65536) + static_cast<float>(round) * 0.125f;
}

// Sends all chunks of `values` in frames, as far as acknowledgements allow.
class ChunkSender {
 public:
  explicit ChunkSender(const Shape& shape) : shape_(shape) {}

  void Start(ByteStream* stream, Values values, uint64_t round) {
    absl::MutexLock lock(&mutex_);
    stream_ = stream;
    values_ = std::move(values);
    round_ = round;
    next_ = 0;
    Advance();
  }
  void OnAck(uint64_t bytes) {
    absl::MutexLock lock(&mutex_);
    acked_ = bytes;
    Advance();
  }
  // Whether everything sent was acknowledged before the deadline.
  bool AwaitAcked() {
    absl::MutexLock lock(&mutex_);
    const auto done = [this]()
                          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return next_ == shape_.chunks() && acked_ == sent_; };
    return mutex_.AwaitWithTimeout(absl::Condition(&done), kDeadline);
  }

 private:
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (values_ != nullptr && next_ < shape_.chunks() && sent_ - acked_ < shape_.window_bytes) {
      const size_t bytes = shape_.size_of(next_);
      v1::ChunkFrame control;
      v1::ChunkHeader* header = control.add_header();
      header->set_chunk(next_);
      header->set_round(round_);
      header->set_elements(bytes / sizeof(float));
      const BorrowedBytes payload{reinterpret_cast<const char*>(values_->data()) + next_ * shape_.chunk_bytes, bytes,
                                  values_};
      stream_->Write(EncodeFrame(control, {&payload, 1}));
      sent_ += bytes;
      ++next_;
    }
  }

  const Shape shape_;
  absl::Mutex mutex_;
  ByteStream* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Values values_ ABSL_GUARDED_BY(mutex_);
  uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t sent_ ABSL_GUARDED_BY(mutex_) = 0;  // payload bytes since the stream's beginning
  uint64_t acked_ ABSL_GUARDED_BY(mutex_) = 0;
};

// One end of the stream: stores the chunks that come, acknowledges them, answers a subscription with its values.
class End : public StreamHandler {
 public:
  End(const Shape& shape, Values values) : shape_(shape), values_(std::move(values)), sender_(shape) {}

  void SetStream(std::shared_ptr<ByteStream> stream) { stream_ = std::move(stream); }
  ByteStream& stream() { return *stream_; }
  ChunkSender& sender() { return sender_; }

  void ExpectRound(uint64_t round) {
    absl::MutexLock lock(&mutex_);
    round_ = round;
    stored_ = 0;
  }
  bool AwaitStored() {
    absl::MutexLock lock(&mutex_);
    const auto all = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stored_ == shape_.chunks() || closed_; };
    return mutex_.AwaitWithTimeout(absl::Condition(&all), kDeadline) && !closed_;
  }

  void OnMessage(grpc::ByteBuffer message) override {
    const auto frame = ParseFrame(std::move(message));
    if (!frame.ok()) return stream_->Close(frame.status());
    if (frame->control.has_ack()) sender_.OnAck(frame->control.ack().bytes());
    if (frame->control.has_subscribe())
      sender_.Start(stream_.get(), values_, frame->control.subscribe().wants(0).version());
    if (frame->control.header_size() > 0) Store(*frame);
  }
  void OnClosed(const absl::Status& status) override {
    if (!status.ok()) LOG_ERROR("the stream ended: {}", std::string(status.message()));
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }

 private:
  void Store(const ParsedFrame& frame) {
    const v1::ChunkHeader& header = frame.control.header(0);
    if (frame.control.header_size() != 1 || header.chunk() >= shape_.chunks() ||
        frame.payload.size() != shape_.size_of(header.chunk())) {
      return stream_->Close(absl::InvalidArgumentError("a chunk outside the table"));
    }
    frame.payload.CopyTo(reinterpret_cast<char*>(values_->data()) + header.chunk() * shape_.chunk_bytes);
    received_ += frame.payload.size();
    v1::ChunkFrame ack;
    ack.mutable_ack()->set_bytes(received_);
    stream_->Write(EncodeFrame(ack, {}));
    absl::MutexLock lock(&mutex_);
    if (header.round() == round_) ++stored_;
  }

  const Shape shape_;
  const Values values_;
  ChunkSender sender_;
  std::shared_ptr<ByteStream> stream_;  // set before the first event that needs it
  uint64_t received_ = 0;               // by the transport's thread
  absl::Mutex mutex_;
  uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t stored_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

class ParameterStreams final
    : public v1::ParameterService::WithRawCallbackMethod_Stream<v1::ParameterService::Service> {
 public:
  explicit ParameterStreams(Acceptor acceptor) : acceptor_(std::move(acceptor)) {}
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Stream(grpc::CallbackServerContext* context) override {
    return NewAcceptedStream(context, acceptor_);
  }

 private:
  const Acceptor acceptor_;
};

// ---------------------------------------------------------------- raw TCP
bool SendAll(int fd, const void* data, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    const ssize_t n = send(fd, static_cast<const char*>(data) + at, std::min(kTcpPiece, bytes - at), MSG_NOSIGNAL);
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

bool ReceiveAll(int fd, void* data, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    const ssize_t n = recv(fd, static_cast<char*>(data) + at, std::min(kTcpPiece, bytes - at), MSG_WAITALL);
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

void NoDelay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// 'P' and the bytes: stores them, answers 'A'. 'G': sends them.
void ServeTcp(int listening, std::vector<float>* values) {
  const int fd = accept(listening, nullptr, nullptr);
  if (fd < 0) return;
  NoDelay(fd);
  const size_t bytes = values->size() * sizeof(float);
  char command;
  while (ReceiveAll(fd, &command, 1)) {
    const bool ok = command == 'P' ? ReceiveAll(fd, values->data(), bytes) && SendAll(fd, "A", 1)
                                   : SendAll(fd, values->data(), bytes);
    if (!ok) break;
  }
  close(fd);
}

// ---------------------------------------------------------------- processes
struct Ports {
  int tcp = 0;
  int grpc = 0;
};

// Pins this process to the index-th core that it may use; false where there are not so many.
bool Pin(int index) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return false;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return sched_setaffinity(0, sizeof(one), &one) == 0;
  }
  return false;
}

// The receiving process; ends when `until` is closed by the other one.
int Serve(const Shape& shape, int report, int until) {
  Pin(1);
  const size_t elements = shape.bytes / sizeof(float);
  auto stored = std::make_shared<std::vector<float>>(elements);
  std::vector<float> blasted(elements);

  const int listening = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(at);
  if (bind(listening, reinterpret_cast<sockaddr*>(&at), sizeof(at)) != 0 || listen(listening, 1) != 0 ||
      getsockname(listening, reinterpret_cast<sockaddr*>(&at), &length) != 0) {
    LOG_ERROR("TCP: {}", std::strerror(errno));
    return 1;
  }
  std::thread blaster(ServeTcp, listening, &blasted);

  ParameterStreams service([&](std::shared_ptr<ByteStream> stream, const std::string&) {
    auto end = std::make_shared<End>(shape, stored);
    end->SetStream(std::move(stream));
    return end;
  });
  auto server = GrpcServer::Start({}, {&service});
  if (!server.ok()) {
    LOG_ERROR("{}", std::string(server.status().message()));
    std::_Exit(1);
  }
  const Ports ports{ntohs(at.sin_port), (*server)->port()};
  if (write(report, &ports, sizeof(ports)) != sizeof(ports)) std::_Exit(1);
  char end;
  while (read(until, &end, 1) < 0 && errno == EINTR) {
  }
  blaster.join();
  close(listening);
  return 0;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

struct Direction {
  std::vector<double> tcp, grpc, ratio;  // GB/s, GB/s, grpc / tcp of the same pair

  void Add(double tcp_rate, double grpc_rate) {
    tcp.push_back(tcp_rate);
    grpc.push_back(grpc_rate);
    ratio.push_back(grpc_rate / tcp_rate);
  }
  // On a quiet machine the socket itself is never slower than what is built on it.
  bool Noisy() const { return Median(ratio) > 1; }
  nlohmann::json Json() const {
    return {{"grpc_gb_per_s", Median(grpc)},
            {"tcp_gb_per_s", Median(tcp)},
            {"ratio", Median(ratio)},
            {"ratio_min", *std::min_element(ratio.begin(), ratio.end())},
            {"ratio_max", *std::max_element(ratio.begin(), ratio.end())},
            {"noisy", Noisy()}};
  }
  void Print(const char* name) const {
    std::printf("%-5s  gRPC %6.2f GB/s   TCP %6.2f GB/s   ratio %.2f (%.2f to %.2f)\n", name, Median(grpc), Median(tcp),
                Median(ratio), *std::min_element(ratio.begin(), ratio.end()),
                *std::max_element(ratio.begin(), ratio.end()));
  }
};

// The pushing and pulling process's work. Returns the exit code.
int Measure(const Shape& shape, const Ports& ports, bool pinned) {
  const size_t elements = shape.bytes / sizeof(float);
  auto pushed = std::make_shared<std::vector<float>>(elements);
  auto pulled = std::make_shared<std::vector<float>>(elements);
  std::vector<float> blasted(elements);

  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(static_cast<uint16_t>(ports.tcp));
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0) {
    LOG_ERROR("TCP: {}", std::strerror(errno));
    return 1;
  }
  NoDelay(fd);
  GrpcTransport transport;
  auto end = std::make_shared<End>(shape, pulled);
  auto stream = transport.Open(HostPort{"127.0.0.1", ports.grpc}.ToString(), Plane::kParameter, end);
  end->SetStream(stream);

  Direction push, pull;
  const int pairs = absl::GetFlag(FLAGS_pairs), warm_up = 2;
  const auto rate = [&](absl::Time start) {
    return static_cast<double>(shape.bytes) / 1e9 / absl::ToDoubleSeconds(absl::Now() - start);
  };
  for (int pair = 0; pair < warm_up + pairs; ++pair) {
    const uint64_t round = static_cast<uint64_t>(pair) + 1;
    for (size_t i = 0; i < elements; ++i) (*pushed)[i] = Expected(i, round);
    std::fill(pulled->begin(), pulled->end(), -1.0f);
    std::fill(blasted.begin(), blasted.end(), -1.0f);
    bool ok = true;
    char answer;

    absl::Time start = absl::Now();
    ok = ok && SendAll(fd, "P", 1) && SendAll(fd, pushed->data(), shape.bytes) && ReceiveAll(fd, &answer, 1);
    const double tcp_push = rate(start);

    start = absl::Now();
    end->sender().Start(stream.get(), pushed, round);
    ok = ok && end->sender().AwaitAcked();
    const double grpc_push = rate(start);

    start = absl::Now();
    ok = ok && SendAll(fd, "G", 1) && ReceiveAll(fd, blasted.data(), shape.bytes);
    const double tcp_pull = rate(start);

    end->ExpectRound(round);
    v1::ChunkFrame subscribe;
    v1::Want* want = subscribe.mutable_subscribe()->add_wants();
    want->set_chunks(shape.chunks());
    want->set_version(round);
    start = absl::Now();
    stream->Write(EncodeFrame(subscribe, {}));
    ok = ok && end->AwaitStored();
    const double grpc_pull = rate(start);

    if (!ok) {
      LOG_ERROR("pair {}: a transfer failed or did not end within {} s", pair, absl::ToInt64Seconds(kDeadline));
      return 1;
    }
    for (size_t i = 0; i < elements; ++i) {
      const float expected = Expected(i, round);
      if ((*pulled)[i] != expected || blasted[i] != expected) {
        LOG_ERROR("pair {}: element {} is {} over gRPC and {} over TCP, expected {}", pair, i, (*pulled)[i], blasted[i],
                  expected);
        return 1;
      }
    }
    if (pair < warm_up) continue;
    push.Add(tcp_push, grpc_push);
    pull.Add(tcp_pull, grpc_pull);
  }
  close(fd);
  stream->Close(absl::OkStatus());

  if (absl::GetFlag(FLAGS_json)) {
    const nlohmann::json json = {{"benchmark", "push_pull"},
                                 {"mib", shape.bytes >> 20},
                                 {"chunk_kib", shape.chunk_bytes >> 10},
                                 {"window_mib", shape.window_bytes >> 20},
                                 {"pairs", pairs},
                                 {"pinned", pinned},
                                 {"verified", true},
                                 {"push", push.Json()},
                                 {"pull", pull.Json()}};
    std::printf("%s\n", json.dump(2).c_str());
  } else {
    std::printf(
        "%zu MiB of float32 in chunks of %zu KiB, window %zu MiB, medians of %d pairs, %s; every element verified\n",
        shape.bytes >> 20, shape.chunk_bytes >> 10, shape.window_bytes >> 20, pairs,
        pinned ? "each end pinned to a core" : "NOT pinned: fewer than two cores");
    std::printf("transport and frames alone: the receiver stores, no server arithmetic\n");
    push.Print("push");
    pull.Print("pull");
    if (push.Noisy() || pull.Noisy()) std::printf("NOISY: other programs use these cores, the ratios say nothing\n");
  }
  return 0;
}

int Main() {
  const int mib = absl::GetFlag(FLAGS_mib), chunk_kib = absl::GetFlag(FLAGS_chunk_kib);
  const int window_mib = absl::GetFlag(FLAGS_window_mib);
  if (mib < 1 || mib > 2048 || chunk_kib < 4 || chunk_kib > 32 << 10 || window_mib < 1 ||
      absl::GetFlag(FLAGS_pairs) < 1) {
    std::fprintf(stderr, "--mib 1 to 2048, --chunk_kib 4 to 32768, --window_mib and --pairs at least 1\n");
    return 2;
  }
  const Shape shape{static_cast<size_t>(mib) << 20, static_cast<size_t>(chunk_kib) << 10,
                    static_cast<size_t>(window_mib) << 20};
  TuneMalloc();
  int report[2], until[2];
  if (pipe(report) != 0 || pipe(until) != 0) return 1;
  const pid_t child = fork();  // before anything of gRPC exists
  if (child < 0) return 1;
  if (child == 0) {
    close(report[0]);
    close(until[1]);
    return Serve(shape, report[1], until[0]);
  }
  close(report[1]);
  close(until[0]);
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  const bool pinned = CPU_COUNT(&allowed) >= 2 && Pin(0);
  Ports ports;
  int code = 1;
  if (read(report[0], &ports, sizeof(ports)) == sizeof(ports)) code = Measure(shape, ports, pinned);
  close(until[1]);
  int status = 0;
  waitpid(child, &status, 0);
  return code == 0 && (!WIFEXITED(status) || WEXITSTATUS(status) != 0) ? 1 : code;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return sluice::Main();
}
