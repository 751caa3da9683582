// Streams to the servers against a scripted server end, and the push queue by itself.
#include "worker/ps_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/inprocess_transport.h"
#include "common/log.h"
#include "common/version.h"
#include "tests/worker/test_plan.h"
#include "worker/push_queue.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(20);

v1::ChunkHeader PushHeader(uint64_t chunk, uint64_t round, uint64_t elements) {
  v1::ChunkHeader header;
  header.set_chunk(chunk);
  header.set_generation(1);
  header.set_round(round);
  header.set_elements(elements);
  return header;
}

// ---------------------------------------------------------------- PushQueue
class PushQueueTest : public ::testing::Test {
 protected:
  void Add(uint64_t chunk, size_t elements, uint64_t round = 0) {
    queue_.Add(PushHeader(chunk, round, elements),
               elements ? BorrowedBytes{memory_.data(), elements * 4, nullptr} : BorrowedBytes());
  }
  // Chunks of the next frame; empty: none.
  std::vector<uint64_t> Next() {
    v1::ChunkFrame control;
    std::vector<BorrowedBytes> payload;
    std::vector<uint64_t> chunks;
    if (!queue_.Next(&control, &payload)) return chunks;
    size_t with_payload = 0, slice = 0;
    for (const v1::ChunkHeader& header : control.header()) {
      chunks.push_back(header.chunk());
      if (header.elements() == 0) continue;
      EXPECT_EQ(payload[slice++].size, header.elements() * 4);
      ++with_payload;
    }
    EXPECT_EQ(payload.size(), with_payload);
    return chunks;
  }

  std::vector<float> memory_ = std::vector<float>(1000);
  PushQueue queue_{1000, 400, /*patient=*/true};  // bytes
};

TEST_F(PushQueueTest, NeighboursTravelTogetherUpToAFrame) {
  for (uint64_t chunk = 0; chunk < 5; ++chunk) Add(chunk, 40);  // 160 bytes each
  EXPECT_THAT(Next(), ElementsAre(0, 1));
  EXPECT_THAT(Next(), ElementsAre(2, 3));
  EXPECT_THAT(Next(), ElementsAre(4));
  EXPECT_THAT(Next(), ElementsAre());
}

// Servers refuse frames that have a chunk twice.
TEST_F(PushQueueTest, AChunkThatIsSaidAgainBeginsAFrame) {
  for (uint64_t chunk : {0, 1, 1, 0, 2}) Add(chunk, 10);
  EXPECT_THAT(Next(), ElementsAre(0, 1));
  EXPECT_THAT(Next(), ElementsAre(1, 0, 2));
  EXPECT_THAT(Next(), ElementsAre());
}

TEST_F(PushQueueTest, HoldsBackWhatTheWindowDoesNotLetThrough) {
  for (uint64_t chunk = 0; chunk < 4; ++chunk) Add(chunk, 100);  // 400 bytes each
  EXPECT_THAT(Next(), ElementsAre(0));
  EXPECT_THAT(Next(), ElementsAre(1));
  EXPECT_THAT(Next(), ElementsAre());
  EXPECT_EQ(queue_.unacknowledged(), 800u);
  ASSERT_TRUE(queue_.Acknowledge(199).ok());
  EXPECT_THAT(Next(), ElementsAre());
  ASSERT_TRUE(queue_.Acknowledge(200).ok());
  EXPECT_THAT(Next(), ElementsAre(2));
  ASSERT_TRUE(queue_.Acknowledge(100).ok()) << "old ones change nothing";
  EXPECT_THAT(Next(), ElementsAre());
  EXPECT_EQ(queue_.Acknowledge(1201).code(), absl::StatusCode::kOutOfRange);
}

TEST_F(PushQueueTest, OneLargerThanTheWindowGoesAlone) {
  Add(0, 500);
  Add(1, 1);
  EXPECT_THAT(Next(), ElementsAre(0));
  EXPECT_THAT(Next(), ElementsAre());
  ASSERT_TRUE(queue_.Acknowledge(2000).ok());
  EXPECT_THAT(Next(), ElementsAre(1));
}

TEST_F(PushQueueTest, TheServersWindowCountsWhereItIsSmaller) {
  for (uint64_t chunk = 0; chunk < 6; ++chunk) Add(chunk, 50);  // 200 bytes each
  queue_.SetWindow(300);
  EXPECT_THAT(Next(), ElementsAre(0));
  EXPECT_THAT(Next(), ElementsAre());
  queue_.SetWindow(5000);  // no more than its own
  EXPECT_THAT(Next(), ElementsAre(1, 2));
  EXPECT_THAT(Next(), ElementsAre(3, 4));
  EXPECT_THAT(Next(), ElementsAre());
  queue_.SetWindow(100);
  ASSERT_TRUE(queue_.Acknowledge(800).ok());
  EXPECT_THAT(Next(), ElementsAre());
  ASSERT_TRUE(queue_.Acknowledge(1000).ok());
  EXPECT_THAT(Next(), ElementsAre(5)) << "larger than the window: alone";
}

TEST_F(PushQueueTest, EmptyContributionsTakeNoWindow) {
  Add(0, 250);  // the whole window
  for (uint64_t chunk = 1; chunk < 4; ++chunk) Add(chunk, 0);
  Add(4, 1);
  Add(5, 0);
  EXPECT_THAT(Next(), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(Next(), ElementsAre()) << "order is kept";
  ASSERT_TRUE(queue_.Acknowledge(1000).ok());
  EXPECT_THAT(Next(), ElementsAre(4, 5));
}

TEST_F(PushQueueTest, LeavesOutCommittedRounds) {
  Add(0, 10, 3);
  Add(1, 10, 4);
  Add(2, 10, 3);
  queue_.DropBefore(4);
  EXPECT_THAT(Next(), ElementsAre(1));
  EXPECT_TRUE(queue_.empty());
}

// Whether each frame until there is none asks to be acknowledged.
TEST_F(PushQueueTest, AsksForAcknowledgementsOfHalfOfTheWindowAndOfTheEnd) {
  const auto asks = [this](bool more) {
    std::vector<bool> out;
    v1::ChunkFrame control;
    std::vector<BorrowedBytes> payload;
    while (queue_.Next(&control, &payload, more)) out.push_back(!control.ack_later());
    return out;
  };
  Add(0, 30);  // 120 bytes
  EXPECT_THAT(asks(true), ElementsAre(false)) << "nothing is under way";
  Add(1, 30);
  EXPECT_THAT(asks(true), ElementsAre()) << "waits for company";
  Add(2, 30);
  Add(3, 60);
  EXPECT_THAT(asks(true), ElementsAre(false)) << "full with two of them: 360 of 1000 bytes";
  Add(4, 60);
  EXPECT_THAT(asks(true), ElementsAre(true)) << "600 of 1000 bytes";
  EXPECT_THAT(asks(false), ElementsAre(true)) << "the last one";
  Add(5, 0);
  EXPECT_THAT(asks(true), ElementsAre());
  EXPECT_THAT(asks(false), ElementsAre(true));
  EXPECT_THAT(asks(false), ElementsAre()) << "nothing waits, all that was sent has been asked for";
  ASSERT_TRUE(queue_.Acknowledge(840).ok());
  for (uint64_t chunk = 6; chunk < 9; ++chunk) Add(chunk, 60);
  EXPECT_THAT(asks(false), ElementsAre(false, false, true));
}

TEST_F(PushQueueTest, WaitsForCompanyOnlyWherePatientAndByWhatItStandsFor) {
  v1::ChunkFrame control;
  std::vector<BorrowedBytes> payload;
  PushQueue impatient(1000, 400);
  for (uint64_t chunk = 0; chunk < 2; ++chunk) {
    impatient.Add(PushHeader(chunk, 0, 10), {memory_.data(), 40, nullptr});
    EXPECT_TRUE(impatient.Next(&control, &payload, /*more=*/true)) << "the second one too, though one is under way";
  }
  Add(0, 30);
  ASSERT_TRUE(queue_.Next(&control, &payload, /*more=*/true));
  Add(1, 30);
  EXPECT_FALSE(queue_.Next(&control, &payload, /*more=*/true));
  queue_.Add(PushHeader(2, 0, 70), {memory_.data(), 70, nullptr});  // a byte an element
  EXPECT_TRUE(queue_.Next(&control, &payload, /*more=*/true)) << "100 elements fill a frame of 400 bytes";
}

TEST_F(PushQueueTest, AsksWithAnEmptyFrameWhereTheLastOneDidNotKnowThatItWas) {
  v1::ChunkFrame control;
  std::vector<BorrowedBytes> payload;
  Add(0, 30);
  ASSERT_TRUE(queue_.Next(&control, &payload, /*more=*/true));
  EXPECT_TRUE(control.ack_later());
  EXPECT_FALSE(queue_.Next(&control, &payload, /*more=*/true));
  ASSERT_TRUE(queue_.Next(&control, &payload, /*more=*/false));
  EXPECT_EQ(control.header_size(), 0);
  EXPECT_TRUE(payload.empty());
  EXPECT_FALSE(control.ack_later());
  EXPECT_FALSE(queue_.Next(&control, &payload, /*more=*/false)) << "once";
}

// Whatever is added in whatever pieces: where the window holds something back, an acknowledgement is on its way.
TEST_F(PushQueueTest, NeverWaitsForAnAcknowledgementThatNobodyAskedFor) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  std::deque<uint64_t> asked;  // bytes that the server will acknowledge
  uint64_t sent = 0;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) Add(0, random() % 3 == 0 ? random() % 600 : random() % 40);
    v1::ChunkFrame control;
    std::vector<BorrowedBytes> payload;
    bool more = random() % 4 != 0;
    for (; queue_.Next(&control, &payload, more); more = random() % 4 != 0) {
      for (const BorrowedBytes& bytes : payload) sent += bytes.size;
      if (!control.ack_later()) asked.push_back(sent);
    }
    EXPECT_TRUE(queue_.empty() || !asked.empty() || more) << "step " << step;
    if (!asked.empty() && random() % 3 == 0) {
      ASSERT_TRUE(queue_.Acknowledge(asked.front()).ok());
      asked.pop_front();
    }
  }
}

TEST_F(PushQueueTest, FramesThatOnlyDescribeLeaveFullWhileMoreFollowsAndKnowNoWindow) {
  memory_.resize(kDescribedPayload / 8);
  const auto next = [this](bool more) {
    v1::ChunkFrame control;
    std::vector<BorrowedBytes> payload;
    return queue_.Next(&control, &payload, more, /*described=*/true) ? payload.size() : 0;
  };
  Add(0, memory_.size());
  EXPECT_EQ(next(true), 0u);
  Add(1, memory_.size());
  EXPECT_EQ(next(true), 2u);
  Add(2, memory_.size());
  EXPECT_EQ(next(true), 0u);
  EXPECT_EQ(next(false), 1u);
  EXPECT_TRUE(queue_.empty());
}

// ---------------------------------------------------------------- PsClient
// Accepts streams and keeps what comes; the test decides what to answer.
class ServerEndFake {
 public:
  struct Accepted {
    std::shared_ptr<ByteStream> stream;
    std::deque<ParsedFrame> frames;
    bool closed = false;
  };

  ServerEndFake(InProcessNetwork* network, const std::string& address)
      : listener_(*network->Listen(address, {{Plane::kParameter, [this](auto stream, const std::string&) {
                                                return Accept(std::move(stream));
                                              }}})) {}

  // The frames of stream `i` once `enough` of them came.
  std::vector<ParsedFrame> Await(size_t i, size_t enough) {
    absl::MutexLock lock(&mutex_);
    const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return accepted_.size() > i && accepted_[i]->frames.size() >= enough;
    };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&ready), kPatience)) << "stream " << i << " lacks frames";
    if (accepted_.size() <= i) return {};
    return {accepted_[i]->frames.begin(), accepted_[i]->frames.end()};
  }
  void AwaitClosed(size_t i) {
    absl::MutexLock lock(&mutex_);
    const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return accepted_.size() > i && accepted_[i]->closed;
    };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&ready), kPatience)) << "stream " << i << " stays open";
  }
  std::shared_ptr<ByteStream> stream(size_t i) {
    absl::MutexLock lock(&mutex_);
    return accepted_.at(i)->stream;
  }
  size_t streams() {
    absl::MutexLock lock(&mutex_);
    return accepted_.size();
  }
  void Send(size_t i, const v1::ChunkFrame& frame, const std::vector<BorrowedBytes>& payload = {}) {
    stream(i)->Write(EncodeFrame(frame, payload));
  }

 private:
  struct Handler : StreamHandler {
    Handler(ServerEndFake* o, std::shared_ptr<Accepted> a) : owner(o), accepted(std::move(a)) {}
    void OnMessage(grpc::ByteBuffer message) override {
      absl::StatusOr<ParsedFrame> frame = ParseFrame(std::move(message));
      CHECK(frame.ok());
      absl::MutexLock lock(&owner->mutex_);
      accepted->frames.push_back(*std::move(frame));
    }
    void OnClosed(const absl::Status&) override {
      absl::MutexLock lock(&owner->mutex_);
      accepted->closed = true;
      accepted->stream = nullptr;
    }
    ServerEndFake* const owner;
    const std::shared_ptr<Accepted> accepted;
  };
  std::shared_ptr<StreamHandler> Accept(std::shared_ptr<ByteStream> stream) {
    auto accepted = std::make_shared<Accepted>();
    accepted->stream = std::move(stream);
    absl::MutexLock lock(&mutex_);
    accepted_.push_back(accepted);
    return std::make_shared<Handler>(this, accepted);
  }

  absl::Mutex mutex_;
  std::vector<std::shared_ptr<Accepted>> accepted_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Listener> listener_;
};

class EventLog : public PsClient::Events {
 public:
  void OnStreamUp(uint64_t generation, size_t server) override { Say("up", generation, server); }
  void OnStreamDown(uint64_t generation, size_t server, const absl::Status&) override {
    Say("down", generation, server);
  }
  absl::Status OnCommits(uint64_t generation, size_t server, const ParsedFrame& frame) override {
    absl::MutexLock lock(&mutex_);
    frames_.push_back(frame);
    Count("commits", generation, server);
    return commit_status_;
  }
  absl::Status OnLater(uint64_t generation, size_t server, const v1::Later& later) override {
    Say("later " + std::to_string(later.again(0).chunk()), generation, server);
    return absl::OkStatus();
  }
  void OnUnreachable(uint64_t generation, size_t server, const absl::Status&) override {
    Say("unreachable", generation, server);
  }
  void OnRefused(uint64_t generation, size_t server, const absl::Status& status) override {
    absl::MutexLock lock(&mutex_);
    refusal_ = status;
    Count("refused", generation, server);
  }

  // "up 1 0" has come so many times.
  bool Await(const std::string& word, int times = 1) {
    absl::MutexLock lock(&mutex_);
    const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return counts_[word] >= times; };
    return mutex_.AwaitWithTimeout(absl::Condition(&ready), kPatience);
  }
  int count(const std::string& word) {
    absl::MutexLock lock(&mutex_);
    return counts_[word];
  }
  std::vector<ParsedFrame> frames() {
    absl::MutexLock lock(&mutex_);
    return frames_;
  }
  void set_commit_status(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    commit_status_ = status;
  }
  absl::Status refusal() {
    absl::MutexLock lock(&mutex_);
    return refusal_;
  }

 private:
  void Say(const std::string& what, uint64_t generation, size_t server) {
    absl::MutexLock lock(&mutex_);
    Count(what, generation, server);
  }
  // Who waits for the count may read what came with it: both change in one critical section.
  void Count(const std::string& what, uint64_t generation, size_t server) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ++counts_[what + " " + std::to_string(generation) + " " + std::to_string(server)];
  }
  absl::Mutex mutex_;
  std::map<std::string, int> counts_ ABSL_GUARDED_BY(mutex_);
  std::vector<ParsedFrame> frames_ ABSL_GUARDED_BY(mutex_);
  absl::Status commit_status_ ABSL_GUARDED_BY(mutex_);
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
};

class PsClientTest : public ::testing::Test {
 protected:
  void SetUp() override { client_ = MakeClient(4000); }

  std::unique_ptr<PsClient> MakeClient(size_t window) {
    return std::make_unique<PsClient>(PsClientOptions{.job_id = "job-1",
                                                      .node = TestNode("worker", 3),
                                                      .transport = transport_.get(),
                                                      .window = window,
                                                      .first_delay = absl::Milliseconds(1),
                                                      .last_delay = absl::Milliseconds(5),
                                                      .accuse_after = absl::Milliseconds(30)},
                                      &events_);
  }
  void Open(uint64_t generation) { client_->Open(generation, 7, {{TestNode("server", 0), "server-0"}}); }
  void Push(uint64_t generation, uint64_t chunk, uint64_t elements) {
    v1::ChunkHeader header = PushHeader(chunk, 0, elements);
    header.set_generation(generation);
    client_->Push(generation, 0, header, {memory_->data(), elements * 4, memory_});
  }

  std::shared_ptr<std::vector<float>> memory_ = std::make_shared<std::vector<float>>(2000, 1.5f);
  InProcessNetwork network_;
  ServerEndFake server_{&network_, "server-0"};
  std::unique_ptr<Transport> transport_ = network_.MakeTransport("worker-3");
  EventLog events_;
  std::unique_ptr<PsClient> client_;
};

TEST_F(PsClientTest, HelloComesFirstThenWhatTheOwnerSays) {
  Open(5);
  ASSERT_TRUE(events_.Await("up 5 0"));
  v1::Subscribe subscribe;
  subscribe.set_generation(5);
  subscribe.add_wants()->set_chunks(9);
  client_->Subscribe(5, 0, subscribe);
  v1::RoundReport report;
  report.set_loss_sum(2.5);
  client_->Report(5, 0, report);
  Push(5, 4, 3);
  client_->Flush();
  const std::vector<ParsedFrame> frames = server_.Await(0, 4);
  const v1::StreamHello& hello = frames[0].control.hello();
  EXPECT_EQ(hello.protocol_version(), kProtocolVersion);
  EXPECT_EQ(hello.job_id(), "job-1");
  EXPECT_EQ(hello.node().name(), "worker-3");
  EXPECT_EQ(hello.contributor(), 7u);
  EXPECT_EQ(hello.generation(), 5u);
  EXPECT_EQ(frames[1].control.subscribe().wants(0).chunks(), 9u);
  EXPECT_EQ(frames[2].control.report().loss_sum(), 2.5);
  EXPECT_EQ(frames[3].control.header(0).chunk(), 4u);
  ASSERT_EQ(frames[3].payload.size(), 12u);
  float values[3];
  frames[3].payload.CopyTo(values);
  EXPECT_THAT(values, ElementsAre(1.5f, 1.5f, 1.5f));
}

TEST_F(PsClientTest, PayloadIsBorrowedNotCopied) {
  Open(1);
  ASSERT_TRUE(events_.Await("up 1 0"));
  Push(1, 0, 1000);
  client_->Flush();
  const std::vector<ParsedFrame> frames = server_.Await(0, 2);
  EXPECT_EQ(frames[1].payload.contiguous(), memory_->data());
  EXPECT_GT(memory_.use_count(), 1) << "the frame keeps the memory alive";
}

TEST_F(PsClientTest, AcknowledgementsMoveTheWindow) {
  Open(1);
  ASSERT_TRUE(events_.Await("up 1 0"));
  for (uint64_t chunk = 0; chunk < 4; ++chunk) {
    Push(1, chunk, 500);  // 2000 bytes; the window takes two
    client_->Flush();
  }
  EXPECT_EQ(server_.Await(0, 3).size(), 3u);  // hello and two
  v1::ChunkFrame ack;
  ack.mutable_ack()->set_bytes(2000);
  server_.Send(0, ack);
  EXPECT_EQ(server_.Await(0, 4).size(), 4u);
  ack.mutable_ack()->set_bytes(4000);
  server_.Send(0, ack);
  EXPECT_EQ(server_.Await(0, 5).back().control.header(0).chunk(), 3u);
}

TEST_F(PsClientTest, ItHeedsTheServersWindow) {
  Open(1);
  ASSERT_TRUE(events_.Await("up 1 0"));
  ASSERT_EQ(server_.Await(0, 1).size(), 1u);  // hello
  v1::ChunkFrame ack;
  ack.mutable_ack()->set_window(2000);
  ack.mutable_later()->add_again()->set_chunk(7);  // says that the frame has been read
  server_.Send(0, ack);
  ASSERT_TRUE(events_.Await("later 7 1 0"));
  for (uint64_t chunk = 0; chunk < 2; ++chunk) {
    Push(1, chunk, 500);  // 2000 bytes
    client_->Flush();
  }
  EXPECT_EQ(server_.Await(0, 2).size(), 2u);  // hello and one
  ack.mutable_ack()->set_bytes(2000);
  server_.Send(0, ack);
  EXPECT_EQ(server_.Await(0, 3).back().control.header(0).chunk(), 1u);
}

TEST_F(PsClientTest, BrokenStreamIsOpenedAgainWithAFreshWindow) {
  Open(1);
  ASSERT_TRUE(events_.Await("up 1 0"));
  Push(1, 0, 1000);
  client_->Flush();
  server_.Await(0, 2);
  network_.Break("worker-3", "server-0");
  ASSERT_TRUE(events_.Await("down 1 0"));
  ASSERT_TRUE(events_.Await("up 1 0", 2));
  EXPECT_TRUE(server_.Await(1, 1)[0].control.has_hello());
  Push(1, 0, 1000);
  client_->Flush();
  EXPECT_EQ(server_.Await(1, 2).size(), 2u);
}

TEST_F(PsClientTest, ServerThatIsNotThereIsAccusedAgainAndAgain) {
  client_->Open(1, 0, {{TestNode("server", 0), "server-0"}, {TestNode("server", 1), "nowhere"}});
  ASSERT_TRUE(events_.Await("unreachable 1 1", 2));
  ASSERT_TRUE(events_.Await("up 1 0"));
  EXPECT_EQ(events_.count("unreachable 1 0"), 0);
}

TEST_F(PsClientTest, NewGenerationDropsTheOldStreams) {
  Open(1);
  ASSERT_TRUE(events_.Await("up 1 0"));
  server_.Await(0, 1);
  Open(2);
  server_.AwaitClosed(0);
  ASSERT_TRUE(events_.Await("up 2 0"));
  Push(1, 0, 1);
  Push(2, 1, 1);
  client_->Flush();
  const std::vector<ParsedFrame> frames = server_.Await(1, 2);
  EXPECT_EQ(frames[0].control.hello().generation(), 2u);
  EXPECT_EQ(frames[1].control.header(0).chunk(), 1u) << "a push of the old generation goes nowhere";
  EXPECT_EQ(events_.count("down 1 0"), 0) << "the owner knows";
}

TEST_F(PsClientTest, CommitsArriveWithTheirPayload) {
  Open(1);
  ASSERT_TRUE(events_.Await("up 1 0"));
  server_.Await(0, 1);
  v1::ChunkFrame commit;
  *commit.add_header() = PushHeader(0, 1, 2);
  *commit.add_header() = PushHeader(1, 1, 1);
  server_.Send(0, commit, {{memory_->data(), 12, memory_}});
  ASSERT_TRUE(events_.Await("commits 1 0"));
  EXPECT_EQ(events_.frames()[0].payload.size(), 12u);
}

TEST_F(PsClientTest, WrongFramesCostTheStreamAndNothingElse) {
  Open(1);
  ASSERT_TRUE(events_.Await("up 1 0"));
  server_.Await(0, 1);
  v1::ChunkFrame commit;
  *commit.add_header() = PushHeader(0, 1, 4);
  server_.Send(0, commit, {{memory_->data(), 12, memory_}});  // 3 elements
  server_.AwaitClosed(0);
  ASSERT_TRUE(events_.Await("up 1 0", 2));
  server_.Await(1, 1);
  commit.mutable_header(0)->set_elements(uint64_t{1} << 62);  // times 4 is 0
  server_.Send(1, commit);
  server_.AwaitClosed(1);
  ASSERT_TRUE(events_.Await("up 1 0", 3));
  server_.Await(2, 1);
  v1::ChunkFrame ack;
  ack.mutable_ack()->set_bytes(1);  // nothing was sent
  server_.Send(2, ack);
  server_.AwaitClosed(2);
  ASSERT_TRUE(events_.Await("up 1 0", 4));
  EXPECT_EQ(events_.count("commits 1 0"), 0);
  server_.Await(3, 1);
  events_.set_commit_status(absl::OutOfRangeError("not in the plan"));
  commit.mutable_header(0)->set_elements(3);
  server_.Send(3, commit, {{memory_->data(), 12, memory_}});
  server_.AwaitClosed(3);
  ASSERT_TRUE(events_.Await("up 1 0", 5));
}

TEST_F(PsClientTest, LastingRefusalIsReportedOnce) {
  Open(1);
  for (size_t i = 0; i < 7; ++i) {
    server_.Await(i, 1);
    v1::ChunkFrame refusal;
    refusal.mutable_refusal()->set_code(static_cast<int>(absl::StatusCode::kInvalidArgument));
    refusal.mutable_refusal()->set_message("chunk 9 is not in the plan");
    server_.Send(i, refusal);
    server_.stream(i)->Close(absl::InvalidArgumentError("refused"));
    server_.AwaitClosed(i);
  }
  ASSERT_TRUE(events_.Await("refused 1 0"));
  EXPECT_THAT(std::string(events_.refusal().message()), HasSubstr("chunk 9 is not in the plan"));
  EXPECT_EQ(events_.count("refused 1 0"), 1);
}

TEST_F(PsClientTest, RefusalOfAnOldGenerationIsOnlyRetried) {
  Open(1);
  for (size_t i = 0; i < 12; ++i) {
    server_.Await(i, 1);
    v1::ChunkFrame refusal;
    refusal.mutable_refusal()->set_code(static_cast<int>(absl::StatusCode::kAborted));
    refusal.mutable_refusal()->set_generation(2);
    server_.Send(i, refusal);
    server_.stream(i)->Close(absl::AbortedError("refused"));
    server_.AwaitClosed(i);
  }
  EXPECT_EQ(events_.count("refused 1 0"), 0);
}

TEST_F(PsClientTest, NothingIsDeliveredAfterStop) {
  Open(1);
  ASSERT_TRUE(events_.Await("up 1 0"));
  client_->Stop();
  const int ups = events_.count("up 1 0");
  server_.AwaitClosed(0);
  Open(2);
  client_ = nullptr;
  EXPECT_EQ(events_.count("up 1 0"), ups);
  EXPECT_EQ(events_.count("up 2 0"), 0);
}

}  // namespace
}  // namespace sluice
