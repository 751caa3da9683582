// Writes the inputs that fuzzing begins with: legal frames of every kind.   fuzz_corpus FOLDER
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz_plan.h"

namespace sluice {
namespace {

void Spill(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::vector<v1::ChunkFrame> Frames() {
  std::vector<v1::ChunkFrame> frames(1);  // the empty one
  *frames.emplace_back().mutable_hello() = FuzzHello(*FuzzPlan().Make(), 0);
  v1::Subscribe* subscribe = frames.emplace_back().mutable_subscribe();
  subscribe->set_generation(1);
  subscribe->add_wants()->set_chunks(4);
  v1::RoundReport* report = frames.emplace_back().mutable_report();
  report->set_generation(1);
  report->set_count(2);
  report->set_loss_sum(1.5);
  v1::LeaseRequest* request = frames.emplace_back().mutable_lease_request();
  request->set_generation(1);
  request->set_number(1);
  for (const uint64_t chunks : {1, 4}) {
    v1::ChunkFrame& push = frames.emplace_back();
    for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
      v1::ChunkHeader* header = push.add_header();
      header->set_chunk(chunk);
      header->set_generation(1);
      header->set_elements(2);
      header->set_count(2);
      header->set_positions(chunks == 1 ? 2 : 0);  // one for async
      push.mutable_payload()->append(8, static_cast<char>(chunk));
    }
  }
  v1::ChunkFrame& empty = frames.emplace_back();  // an empty contribution
  empty.add_header()->set_generation(1);
  frames.emplace_back().mutable_ack()->set_bytes(8);
  frames.emplace_back().mutable_refusal()->set_message("no");
  frames.emplace_back().mutable_lease()->set_positions(2);
  return frames;
}

// Contributions that the plan does not allow.
std::vector<v1::ChunkFrame> Refused() {
  std::vector<v1::ChunkFrame> frames;
  const auto push = [&] {
    v1::ChunkFrame& frame = frames.emplace_back();
    v1::ChunkHeader* header = frame.add_header();
    header->set_generation(1);
    header->set_elements(2);
    header->set_count(2);
    frame.set_payload(std::string(8, '\1'));
    return header;
  };
  push()->set_contributor(1);
  push()->set_contributor(2);
  push()->set_chunk(4);
  push()->set_generation(2);
  push()->set_round(1);
  push()->set_elements(1);
  push()->set_encoding(static_cast<v1::Encoding>(1));
  push()->set_count(-1);
  push()->set_space(1);
  return frames;
}

std::string Framed(const std::string& bytes) {
  return std::string({static_cast<char>(bytes.size() & 0xff), static_cast<char>(bytes.size() >> 8)}) + bytes;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  using namespace sluice;
  if (argc != 2) {
    std::fprintf(stderr, "usage: fuzz_corpus FOLDER\n");
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  for (const char* program : {"frame", "server"}) std::filesystem::create_directories(folder / program);
  int number = 0;
  std::string all;
  for (const v1::ChunkFrame& frame : Frames()) {
    const std::string bytes = frame.SerializeAsString();
    const std::string name = "seed-" + std::to_string(number++);
    for (const int piece : {0, 1, 5}) {
      Spill(folder / "frame" / (name + "-" + std::to_string(piece)), static_cast<char>(piece) + bytes);
    }
    for (const int flags : {0, 1, 2, 3, 4}) {
      Spill(folder / "server" / (name + "-" + std::to_string(flags)), static_cast<char>(flags) + Framed(bytes));
    }
    if (!frame.has_hello()) all += Framed(bytes);
  }
  for (const int flags : {0, 1, 2, 4})
    Spill(folder / "server" / ("all-" + std::to_string(flags)), static_cast<char>(flags) + all);
  // After a legal contribution to the same chunk.
  const std::string legal = Framed(Frames()[5].SerializeAsString());
  number = 0;
  for (const v1::ChunkFrame& frame : Refused()) {
    const std::string name = "refused-" + std::to_string(number++);
    for (const int flags : {0, 1, 2, 4}) {
      Spill(folder / "server" / (name + "-" + std::to_string(flags)),
            static_cast<char>(flags) + legal + Framed(frame.SerializeAsString()));
    }
  }
  return 0;
}
