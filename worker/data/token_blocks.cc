// Text bytes and nanoGPT token files: one long sequence of tokens, cut into blocks of `context`.
//
// Sample i of an epoch is tokens [phase + i*T, phase + i*T + T), each predicting its successor. The phase differs
// between epochs so that blocks do; the number of samples n does not: it leaves room for every phase. Held-out blocks
// lie at the end, without phase, and the training part ends with the first held-out token, which it predicts and never
// reads.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/data/file.h"
#include "worker/data/sources.h"

namespace sluice {
namespace {

template <typename Unit>  // uint8_t: text; uint16_t: token file
class TokenSequence {
 public:
  TokenSequence() = default;
  explicit TokenSequence(std::vector<Unit> tokens) : tokens_(std::move(tokens)) {}

  uint64_t size() const { return tokens_.size(); }
  int32_t operator[](uint64_t i) const { return tokens_[i]; }
  // Index of the first token that is not below `vocabulary`, or size().
  uint64_t FirstOutside(uint32_t vocabulary) const {
    if (vocabulary > std::numeric_limits<Unit>::max()) return size();
    for (uint64_t i = 0; i < size(); ++i) {
      if (tokens_[i] >= vocabulary) return i;
    }
    return size();
  }

 private:
  std::vector<Unit> tokens_;
};

// Whole blocks of T tokens that have a successor each.
uint64_t Blocks(uint64_t tokens, uint64_t context) { return tokens == 0 ? 0 : (tokens - 1) / context; }

template <typename Unit>
class TokenBlocks : public Dataset {
 public:
  // train: tokens [0, train_end) are trained on; evaluation: `eval_blocks` blocks of `evaluation` from its token
  // `eval_begin`.
  struct Parts {
    std::shared_ptr<const TokenSequence<Unit>> train, evaluation;
    uint64_t train_end = 0, eval_begin = 0, eval_blocks = 0;
  };

  TokenBlocks(Parts parts, uint64_t context, uint64_t phases, uint64_t samples, const v1::JobSpec& spec,
              uint32_t vocabulary)
      : parts_(std::move(parts)),
        context_(context),
        phases_(phases),
        vocabulary_(vocabulary),
        order_(samples, SeedOf(spec), Shuffles(spec.data())) {}

  uint64_t train_samples() const override { return order_.samples(); }
  uint64_t eval_samples() const override { return parts_.eval_blocks; }

  Batch Train(Range positions) const override {
    Batch batch = Start(positions);
    order_.ForEach(positions, [&](const EpochOrder::Epoch& epoch, uint64_t sample) {
      Append(*parts_.train, epoch.phase % phases_ + sample * context_, &batch);
    });
    return batch;
  }

  Batch Evaluation(Range samples) const override {
    Batch batch = Start(samples);
    for (uint64_t i = samples.begin; i < samples.end; ++i) {
      Append(*parts_.evaluation, parts_.eval_begin + i * context_, &batch);
    }
    return batch;
  }

  uint32_t vocabulary() const override { return vocabulary_; }
  uint64_t inputs() const override { return 0; }
  uint32_t classes() const override { return 0; }

 private:
  Batch Start(Range range) const {
    Batch batch;
    batch.rows = static_cast<int64_t>(range.size());
    batch.length = batch.rows == 0 ? 0 : static_cast<int64_t>(context_);
    batch.count = batch.rows * batch.length;
    batch.tokens.reserve(batch.count);
    batch.targets.reserve(batch.count);
    return batch;
  }

  void Append(const TokenSequence<Unit>& from, uint64_t first, Batch* batch) const {
    for (uint64_t t = 0; t < context_; ++t) {
      batch->tokens.push_back(from[first + t]);
      batch->targets.push_back(from[first + t + 1]);
    }
  }

  const Parts parts_;
  const uint64_t context_;
  const uint64_t phases_;  // the phase is below it
  const uint32_t vocabulary_;
  const EpochOrder order_;
};

absl::Status TooShort(const std::string& path, uint64_t tokens, uint64_t context, const char* unit) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", tokens, " ", unit, ", but a block of model.gpt2.context ",
                                                 context, " needs ", context + 1,
                                                 "; use a longer file or a smaller context"));
}

template <typename Unit>
absl::StatusOr<std::shared_ptr<const Dataset>> MakeBlocks(const v1::JobSpec& spec, uint32_t vocabulary,
                                                          const char* unit, const std::string& path,
                                                          std::shared_ptr<const TokenSequence<Unit>> train,
                                                          const std::string& validation_path,
                                                          std::shared_ptr<const TokenSequence<Unit>> validation) {
  const uint64_t context = spec.model().gpt2().context();
  const uint64_t blocks = Blocks(train->size(), context);
  if (blocks == 0) return TooShort(path, train->size(), context, unit);

  typename TokenBlocks<Unit>::Parts parts;
  parts.train = train;
  uint64_t kept = blocks;
  if (validation != nullptr) {
    parts.evaluation = validation;
    parts.eval_blocks = Blocks(validation->size(), context);
    if (parts.eval_blocks == 0) return TooShort(validation_path, validation->size(), context, unit);
    parts.train_end = train->size();
  } else {
    parts.evaluation = train;
    parts.eval_blocks = HeldOut(blocks, ValidationFraction(spec.data()));
    kept = blocks - parts.eval_blocks;
    parts.eval_begin = kept * context;
    parts.train_end = parts.eval_blocks > 0 ? parts.eval_begin + 1 : train->size();
  }

  // n and the phases: n blocks fit after any phase. One block fewer buys all of them, where there are two; tokens left
  // over at the end of the file may do it for free.
  uint64_t samples = kept, phases = 1;
  if (Shuffles(spec.data())) {
    uint64_t slack = parts.train_end - 1 - samples * context;
    if (slack + 1 < context && samples > 1) {
      --samples;
      slack += context;
    }
    phases = std::min(context, slack + 1);
  }
  return std::make_shared<const TokenBlocks<Unit>>(std::move(parts), context, phases, samples, spec, vocabulary);
}

absl::Status Outside(const std::string& path, uint64_t index, size_t unit, int32_t token, uint32_t vocabulary) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": token ", token, " at byte offset ", index * unit,
                                                 " (token number ", index, ") is outside model.gpt2.vocabulary ",
                                                 vocabulary));
}

constexpr uint32_t kLlmcMagic = 20240520;

absl::StatusOr<std::shared_ptr<const TokenSequence<uint16_t>>> ReadTokens(const std::string& path,
                                                                          uint32_t vocabulary) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadDataFile(path));
  const auto* b = reinterpret_cast<const uint8_t*>(bytes.data());
  if (bytes.size() % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": odd size of ", bytes.size(),
        " bytes; tokens are 2 bytes each (little-endian uint16, no header): the file is cut off or of another format"));
  }
  if (bytes.size() >= 1024) {
    uint32_t head[2];
    for (int i = 0; i < 2; ++i)
      head[i] = b[4 * i] | b[4 * i + 1] << 8 | b[4 * i + 2] << 16 | uint32_t{b[4 * i + 3]} << 24;
    if ((head[0] == kLlmcMagic || head[0] == 20240326 || head[0] == 20240801) && head[1] <= 16) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": begins with llm.c's header (magic ", head[0], ", version ", head[1],
                       "), but data.tokens takes nanoGPT's files, which have none; cut the first 1,024 bytes off a "
                       "file of 16-bit tokens (tail -c +1025)"));
    }
  }
  std::vector<uint16_t> tokens(bytes.size() / 2);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(b[2 * i] | b[2 * i + 1] << 8);
  auto sequence = std::make_shared<const TokenSequence<uint16_t>>(std::move(tokens));
  const uint64_t bad = sequence->FirstOutside(vocabulary);
  if (bad < sequence->size()) return Outside(path, bad, 2, (*sequence)[bad], vocabulary);
  return sequence;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Dataset>> OpenText(const v1::JobSpec& spec, const std::string& data_root) {
  RETURN_IF_ERROR(CheckTokenModel(spec, "text"));
  ASSIGN_OR_RETURN(const std::string path, ResolveDataPath(spec.data().text().path(), data_root, "data.text.path"));
  ASSIGN_OR_RETURN(const std::string bytes, ReadDataFile(path));
  if (bytes.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": the file is empty, nothing to train on"));
  auto text = std::make_shared<const TokenSequence<uint8_t>>(std::vector<uint8_t>(bytes.begin(), bytes.end()));
  const uint32_t model = spec.model().gpt2().vocabulary();
  const uint64_t bad = model == 0 ? text->size() : text->FirstOutside(model);
  if (bad < text->size()) return Outside(path, bad, 1, (*text)[bad], model);
  return MakeBlocks<uint8_t>(spec, 256, "bytes", path, text, "", nullptr);
}

absl::StatusOr<std::shared_ptr<const Dataset>> OpenTokens(const v1::JobSpec& spec, const std::string& data_root) {
  RETURN_IF_ERROR(CheckTokenModel(spec, "tokens"));
  const uint32_t vocabulary = spec.model().gpt2().vocabulary();
  if (vocabulary == 0) {
    return absl::InvalidArgumentError(
        "model.gpt2.vocabulary: needed with data.tokens, which does not say it; found none");
  }
  const v1::TokenSource& source = spec.data().tokens();
  ASSIGN_OR_RETURN(const std::string path, ResolveDataPath(source.path(), data_root, "data.tokens.path"));
  ASSIGN_OR_RETURN(auto train, ReadTokens(path, vocabulary));
  std::string validation_path;
  std::shared_ptr<const TokenSequence<uint16_t>> validation;
  if (!source.validation_path().empty()) {
    ASSIGN_OR_RETURN(validation_path,
                     ResolveDataPath(source.validation_path(), data_root, "data.tokens.validation_path"));
    ASSIGN_OR_RETURN(validation, ReadTokens(validation_path, vocabulary));
  }
  return MakeBlocks<uint16_t>(spec, 0, "tokens", path, train, validation_path, validation);
}

}  // namespace sluice
