// Raw TCP between two processes of one host: what a socket of this machine can carry, to hold other paths against.
//
//   hot:        send() of 256 KiB pieces, again and again the same 256 KiB; recv() of 128 KiB, again and again into the
//               same 128 KiB, with SO_RCVLOWAT set so that it is woken only when as much is there. Neither end touches
//               memory beyond its caches, nobody keeps the data, buffers of the socket are as the kernel sizes them.
//   plain:      the same without SO_RCVLOWAT, 64 KiB a recv(): what a straightforward program gets. The sender pays an
//               interrupt for the other core with every 64 KiB segment, as the receiver sleeps again after each; in a
//               virtual machine that is a sixth of the time and more. Where the receiver happens to fall behind, it
//               is not woken and a plain transfer comes near the hot one.
//   into place: as hot, but send() out of the memory that holds all the data and recv() into memory that keeps
//               all of it: what every receiver that keeps what comes must pay at least.
//
// The clock is the caller's: a push lasts until the other end has said that it has everything, a pull from the request
// until the last byte is here. Every transfer carries the same number of bytes.
#ifndef SLUICE_BENCH_BLASTER_H_
#define SLUICE_BENCH_BLASTER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

// The answering end, with a thread of its own; one connection. `host`: an IPv4 address, of this end here and below.
class BlasterServer {
 public:
  static absl::StatusOr<std::unique_ptr<BlasterServer>> Start(size_t bytes, const std::string& host = "127.0.0.1");
  // Ends the thread, whatever it waits for.
  ~BlasterServer();
  BlasterServer(const BlasterServer&) = delete;
  BlasterServer& operator=(const BlasterServer&) = delete;

  int port() const { return port_; }

 private:
  BlasterServer(int listening, int port, size_t bytes);
  void Serve();

  const int listening_, port_;
  const size_t bytes_;
  std::vector<char> kept_;  // by its thread
  std::thread thread_;
};

// The asking end. Blocks; not thread-safe. UNAVAILABLE: the connection broke.
class Blaster {
 public:
  static absl::StatusOr<std::unique_ptr<Blaster>> Connect(int port, size_t bytes,
                                                          const std::string& host = "127.0.0.1");
  ~Blaster();
  Blaster(const Blaster&) = delete;
  Blaster& operator=(const Blaster&) = delete;

  absl::Status PushHot();
  absl::Status PullHot();
  absl::Status PushPlain();
  absl::Status PullPlain();
  absl::Status PushFrom(const void* data);  // into place there
  absl::Status PullInto(void* data);        // what was pushed last by PushFrom

 private:
  Blaster(int fd, size_t bytes);
  absl::Status Push(char request, const char* data, size_t window);
  absl::Status Pull(char request, char* data, size_t window, size_t piece, bool few_wakes);

  const int fd_;
  const size_t bytes_;
  std::vector<char> hot_;
};

// A ping-pong of whole messages: the answering end sends each back, one send() a message.
class EchoServer {
 public:
  static absl::StatusOr<std::unique_ptr<EchoServer>> Start(size_t message_bytes);
  ~EchoServer();  // as BlasterServer's
  EchoServer(const EchoServer&) = delete;
  EchoServer& operator=(const EchoServer&) = delete;

  int port() const { return port_; }  // of 127.0.0.1

 private:
  EchoServer(int listening, int port, size_t message_bytes);
  void Serve();

  const int listening_, port_;
  std::vector<char> message_;  // by its thread
  std::thread thread_;
};

// The asking end. Blocks; not thread-safe. UNAVAILABLE: the connection broke.
class Echo {
 public:
  static absl::StatusOr<std::unique_ptr<Echo>> Connect(int port, size_t message_bytes);
  ~Echo();
  Echo(const Echo&) = delete;
  Echo& operator=(const Echo&) = delete;

  // Sends `count` messages, one send() each, then reads as many: no more than the sockets hold. DATA_LOSS where another
  // one comes than was sent.
  absl::Status Trips(int count);

 private:
  Echo(int fd, size_t message_bytes) : fd_(fd), sent_(message_bytes), came_(message_bytes) {}

  const int fd_;
  std::vector<char> sent_, came_;
  uint64_t number_ = 0;  // in each message
};

}  // namespace sluice

#endif  // SLUICE_BENCH_BLASTER_H_
