// GPT-2's byte-pair encoding of one text on one thread: MB of text per second of CPU time, encoding with an empty
// memory (each pre-token is merged the first time) and with a full one, decoding, and cutting into pre-tokens alone,
// which encoding cannot be faster than.
//
//   bench_tokenize --vocab encoder.json --merges vocab.bpe --text FILE [--pairs 5] [--json]
//
// The result is checked: the tokens' bytes must be the text, else the program ends with 1.
#include <time.h>

#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/measure.h"
#include "common/status_macros.h"
#include "worker/data/file.h"
#include "worker/data/gpt2_bpe.h"
#include "worker/data/pre_tokens.h"

ABSL_FLAG(std::string, vocab, "", "vocab.json, also named encoder.json");
ABSL_FLAG(std::string, merges, "", "merges.txt, also named vocab.bpe");
ABSL_FLAG(std::string, text, "", "the text");
ABSL_FLAG(int, pairs, 5, "how often each path is measured, in turn");
ABSL_FLAG(bool, json, false, "one JSON object instead of lines");

namespace sluice {
namespace {

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

absl::Status Run() {
  ASSIGN_OR_RETURN(const auto bpe, Gpt2Bpe::Load(absl::GetFlag(FLAGS_vocab), absl::GetFlag(FLAGS_merges)));
  ASSIGN_OR_RETURN(const std::string text, ReadDataFile(absl::GetFlag(FLAGS_text)));
  const double megabytes = static_cast<double>(text.size()) * 1e-6;
  Gpt2Encoder warm(bpe);
  std::vector<int32_t> tokens, again;
  warm.Encode(text, &tokens);
  if (bpe->Decode(tokens) != text) return absl::InternalError("the tokens' bytes are not the text");

  size_t words = 0;
  std::string decoded;
  const std::pair<const char*, std::function<void()>> paths[] = {
      {"encode", [&] { again.clear(), Gpt2Encoder(bpe).Encode(text, &again); }},
      {"encode_known", [&] { again.clear(), warm.Encode(text, &again); }},
      {"decode", [&] { decoded = bpe->Decode(tokens); }},
      {"cut_only",
       [&] {
         words = 0;
         for (size_t at = 0; at < text.size(); at = PreTokenEnd(text, at)) ++words;
       }},
  };
  std::vector<double> rates[4];
  for (int i = 0; i < std::max(1, absl::GetFlag(FLAGS_pairs)); ++i) {
    for (int p = 0; p < 4; ++p) {
      const double begin = ThreadSeconds();
      paths[p].second();
      rates[p].push_back(megabytes / (ThreadSeconds() - begin));
      if (again != tokens) return absl::InternalError("encoding twice gave different tokens");
    }
  }
  if (decoded != text) return absl::InternalError("the tokens' bytes are not the text");

  nlohmann::ordered_json out = {{"bytes", text.size()}, {"pre_tokens", words}, {"tokens", tokens.size()}};
  for (int p = 0; p < 4; ++p) out[std::string(paths[p].first) + "_mb_per_s"] = QuartilesOf(rates[p]).median;
  if (absl::GetFlag(FLAGS_json)) {
    std::printf("%s\n", out.dump().c_str());
    return absl::OkStatus();
  }
  std::printf("%s, %s, one thread; %.2f MB of text, %zu pre-tokens, %zu tokens\n", DateAndMachine().c_str(),
              PriorityName().c_str(), megabytes, words, tokens.size());
  const double limit = QuartilesOf(rates[3]).median;
  for (int p = 0; p < 4; ++p) {
    const Quartiles q = QuartilesOf(rates[p]);
    std::printf("%-13s %7.1f MB/s (%.1f to %.1f), %.2f of cutting alone\n", paths[p].first, q.median, q.low, q.high,
                q.median / limit);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = sluice::Run();
  if (!status.ok()) std::fprintf(stderr, "bench_tokenize: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
