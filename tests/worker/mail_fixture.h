// Ranks of one job with their PeerMail, each a node of its own on the in-process network or over gRPC on loopback.
#ifndef SLUICE_TESTS_WORKER_MAIL_FIXTURE_H_
#define SLUICE_TESTS_WORKER_MAIL_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/frame.h"
#include "common/grpc_transport.h"
#include "common/inprocess_transport.h"
#include "common/version.h"
#include "sluice/v1/peer.grpc.pb.h"
#include "tests/worker/test_plan.h"
#include "worker/mail_stream.h"
#include "worker/parallel/collectives.h"
#include "worker/peer_mail.h"

namespace sluice {

inline constexpr absl::Duration kMailPatience = absl::Seconds(60);  // of a wait that normally takes milliseconds

using Floats = std::vector<float>;

inline Floats Numbers(size_t floats, float first = 0) {
  Floats values(floats);
  std::iota(values.begin(), values.end(), first);
  return values;
}

inline absl::Status Get(PeerGroup& group, uint32_t from, Floats* values) {
  return group.Receive(from, absl::MakeSpan(*values));
}

inline void ExpectMessage(PeerGroup& group, uint32_t from, const Floats& expected) {
  Floats values(expected.size(), -1);
  const absl::Status status = Get(group, from, &values);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(values == expected) << expected.size() << " floats";
}

// Where nodes listen and open streams.
class MailNet {
 public:
  virtual ~MailNet() = default;
  // Returns the address.
  virtual std::string Listen(uint32_t rank, Acceptor acceptor) = 0;
  virtual std::unique_ptr<Transport> MakeTransport(uint32_t rank) = 0;
  virtual void StopListening(uint32_t rank) = 0;
};

class InProcessMailNet : public MailNet {
 public:
  explicit InProcessMailNet(const InProcessOptions& options = {}) : network_(options) {}
  std::string Listen(uint32_t rank, Acceptor acceptor) override {
    auto listener = network_.Listen(Name(rank), {{Plane::kMail, std::move(acceptor)}});
    EXPECT_TRUE(listener.ok()) << listener.status();
    listeners_.resize(std::max<size_t>(listeners_.size(), rank + 1));
    listeners_[rank] = *std::move(listener);
    return Name(rank);
  }
  void StopListening(uint32_t rank) override { listeners_[rank] = nullptr; }
  std::unique_ptr<Transport> MakeTransport(uint32_t rank) override { return network_.MakeTransport(Name(rank)); }
  InProcessNetwork& network() { return network_; }
  static std::string Name(uint32_t rank) { return TestNode("worker", rank).name(); }

 private:
  InProcessNetwork network_;
  std::vector<std::unique_ptr<Listener>> listeners_;
};

class MailService final : public v1::PeerService::WithRawCallbackMethod_Mail<v1::PeerService::Service> {
 public:
  explicit MailService(Acceptor acceptor) : acceptor_(std::move(acceptor)) {}
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Mail(grpc::CallbackServerContext* context) override {
    return NewAcceptedStream(context, acceptor_);
  }

 private:
  const Acceptor acceptor_;
};

class GrpcMailNet : public MailNet {
 public:
  std::string Listen(uint32_t rank, Acceptor acceptor) override {
    ends_.resize(std::max<size_t>(ends_.size(), rank + 1));
    ends_[rank].service = std::make_unique<MailService>(std::move(acceptor));
    auto server = GrpcServer::Start({}, {ends_[rank].service.get()});
    EXPECT_TRUE(server.ok()) << server.status();
    ends_[rank].server = *std::move(server);
    return ends_[rank].server->address();
  }
  void StopListening(uint32_t rank) override { ends_[rank].server = nullptr; }
  std::unique_ptr<Transport> MakeTransport(uint32_t) override { return std::make_unique<GrpcTransport>(); }

 private:
  struct End {
    std::unique_ptr<MailService> service;
    std::unique_ptr<GrpcServer> server;
  };
  std::vector<End> ends_;
};

class MailRanks {
 public:
  MailRanks(MailNet* net, const TestPlan& plan, const PeerMailOptions& options = {}) : net_(net), plan_(plan) {
    const uint32_t ranks = plan.replicas * plan.pipeline * plan.tensor;
    for (uint32_t r = 0; r < ranks; ++r) {
      ranks_.push_back(std::make_unique<Rank>());
      Rank* const rank = ranks_.back().get();
      rank->transport = net->MakeTransport(r);
      plan_.addresses.push_back(net->Listen(r, MakeMailAcceptor([rank](const std::string& job) {
                                              absl::MutexLock lock(&rank->mutex);
                                              return job == "job-1" && rank->here ? rank->mail : nullptr;
                                            })));
    }
    const std::shared_ptr<const Layout> layout = plan_.Make();
    for (uint32_t r = 0; r < ranks; ++r) {
      PeerMailOptions own = options;
      own.job_id = "job-1";
      own.node = TestNode("worker", r);
      own.transport = ranks_[r]->transport.get();
      absl::MutexLock lock(&ranks_[r]->mutex);
      ranks_[r]->mail = std::make_shared<PeerMail>(own, *layout, r);
    }
  }
  ~MailRanks() {
    for (auto& rank : ranks_) rank->mail->Stop();
    for (uint32_t r = 0; r < ranks_.size(); ++r) net_->StopListening(r);
    for (auto& rank : ranks_) rank->transport = nullptr;
  }

  uint32_t size() const { return static_cast<uint32_t>(ranks_.size()); }
  PeerMail& mail(uint32_t r) { return *ranks_[r]->mail; }
  PeerGroup& tensor(uint32_t r) { return *mail(r).tensor(); }
  PeerGroup& stages(uint32_t r) { return *mail(r).stages(); }
  const std::string& address(uint32_t r) const { return plan_.addresses[r]; }
  // Whether streams find the job there. At first: yes.
  void SetHere(uint32_t r, bool here) {
    absl::MutexLock lock(&ranks_[r]->mutex);
    ranks_[r]->here = here;
  }

  std::shared_ptr<const Layout> Plan(uint64_t generation) const {
    TestPlan plan = plan_;
    plan.generation = generation;
    return plan.Make();
  }
  void Begin(uint32_t r, uint64_t generation, uint64_t round = 0) {
    mail(r).Begin(Plan(generation), r);
    mail(r).StartRound(generation, round);
  }
  void BeginAll(uint64_t generation, uint64_t round = 0) {
    for (uint32_t r = 0; r < size(); ++r) Begin(r, generation, round);
  }
  // Runs on a thread for each rank.
  void OnAll(const std::function<void(uint32_t)>& body) {
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < size(); ++r) threads.emplace_back([&body, r] { body(r); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  struct Rank {
    std::unique_ptr<Transport> transport;
    absl::Mutex mutex;
    bool here ABSL_GUARDED_BY(mutex) = true;
    std::shared_ptr<PeerMail> mail;  // constant after construction
  };
  MailNet* const net_;
  TestPlan plan_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// A stream that a test writes by hand, and what comes back.
class RawMail {
 public:
  RawMail(Transport* transport, const std::string& address) : end_(std::make_shared<End>()) {
    stream_ = transport->Open(address, Plane::kMail, end_);
  }
  ~RawMail() {
    stream_->Close(absl::CancelledError("the test ends"));
    AwaitClosed().IgnoreError();
  }
  void Send(const v1::MailFrame& frame, const std::string& payload = "") {
    const auto owned = std::make_shared<std::string>(payload);
    const BorrowedBytes bytes = {owned->data(), owned->size(), owned};
    stream_->Write(EncodeMail(frame, {&bytes, 1}));
  }
  void SendBytes(const std::string& bytes) {
    const grpc::Slice slice(bytes);
    stream_->Write(grpc::ByteBuffer(&slice, 1));
  }
  // As the rank that the test plan makes of worker `from`.
  static v1::MailFrame Hello(uint32_t from, uint32_t to, uint64_t generation) {
    v1::MailFrame frame;
    v1::MailHello* const hello = frame.mutable_hello();
    hello->set_protocol_version(kProtocolVersion);
    hello->set_job_id("job-1");
    *hello->mutable_node() = TestNode("worker", from);
    hello->set_generation(generation);
    hello->set_from(from);
    hello->set_to(to);
    return frame;
  }
  bool AwaitWelcome() { return end_->Await(&End::welcomed); }
  absl::Status AwaitClosed() {
    EXPECT_TRUE(end_->Await(&End::closed));
    absl::MutexLock lock(&end_->mutex);
    return end_->status;
  }
  bool closed() const {
    absl::MutexLock lock(&end_->mutex);
    return end_->closed;
  }
  uint64_t AwaitTaken(uint64_t number) {
    absl::MutexLock lock(&end_->mutex);
    const auto there = [&]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(end_->mutex) { return end_->taken >= number || end_->closed; };
    end_->mutex.AwaitWithTimeout(absl::Condition(&there), kMailPatience);
    return end_->taken;
  }

 private:
  struct End : StreamHandler {
    void OnMessage(grpc::ByteBuffer message) override {
      const absl::StatusOr<ParsedMail> frame = ParseMail(std::move(message));
      EXPECT_TRUE(frame.ok()) << frame.status();
      if (!frame.ok()) return;
      absl::MutexLock lock(&mutex);
      if (frame->control.has_welcome()) welcomed = true;
      if (frame->control.has_ack()) taken = frame->control.ack().taken();
    }
    void OnClosed(const absl::Status& s) override {
      absl::MutexLock lock(&mutex);
      status = s;
      closed = true;
    }
    bool Await(bool End::*what) {
      absl::MutexLock lock(&mutex);
      const auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return this->*what || closed; };
      mutex.AwaitWithTimeout(absl::Condition(&there), kMailPatience);
      return this->*what;
    }
    absl::Mutex mutex;
    bool welcomed = false, closed = false;
    uint64_t taken = 0;
    absl::Status status;
  };
  const std::shared_ptr<End> end_;
  std::shared_ptr<ByteStream> stream_;
};

}  // namespace sluice

#endif  // SLUICE_TESTS_WORKER_MAIL_FIXTURE_H_
