// Sample i of an epoch is tokens [phase + i*T, phase + i*T + T), each predicting its successor. The phase differs
// between epochs so that blocks do; the number of samples n does not: it leaves room for every phase. Held-out blocks
// lie at the end, without phase, and the training part ends with the first held-out token, which it predicts and never
// reads.
#include "worker/data/token_blocks.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "worker/data/sources.h"

namespace sluice {
namespace {

// Whole blocks of T tokens that have a successor each.
uint64_t Blocks(uint64_t tokens, uint64_t context) { return tokens == 0 ? 0 : (tokens - 1) / context; }

template <typename Unit>
class TokenBlocks : public Dataset {
 public:
  // train: tokens [0, train_end) are trained on; evaluation: `eval_blocks` blocks of `evaluation` from its token
  // `eval_begin`.
  struct Parts {
    std::shared_ptr<const std::vector<Unit>> train, evaluation;
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

  void Append(const std::vector<Unit>& from, uint64_t first, Batch* batch) const {
    for (uint64_t t = 0; t < context_; ++t) {
      batch->tokens.push_back(static_cast<int32_t>(from[first + t]));
      batch->targets.push_back(static_cast<int32_t>(from[first + t + 1]));
    }
  }

  const Parts parts_;
  const uint64_t context_;
  const uint64_t phases_;  // the phase is below it
  const uint32_t vocabulary_;
  const EpochOrder order_;
};

absl::Status TooShort(const std::string& path, uint64_t tokens, uint64_t context, const std::string& unit) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", tokens, " ", unit, ", but a block of model.gpt2.context ",
                                                 context, " needs ", context + 1,
                                                 "; use a longer file or a smaller context"));
}

}  // namespace

template <typename Unit>
absl::StatusOr<std::shared_ptr<const Dataset>> MakeTokenBlocks(const v1::JobSpec& spec, uint32_t vocabulary,
                                                               const std::string& unit,
                                                               std::unique_ptr<TokenPart<Unit>> train,
                                                               std::unique_ptr<TokenPart<Unit>> validation) {
  const uint64_t context = spec.model().gpt2().context();
  const uint64_t size = train->tokens.size();
  const uint64_t blocks = Blocks(size, context);
  if (blocks == 0) return TooShort(train->path, size, context, unit);

  typename TokenBlocks<Unit>::Parts parts;
  parts.train = std::make_shared<const std::vector<Unit>>(std::move(train->tokens));
  uint64_t kept = blocks;
  if (validation != nullptr) {
    parts.eval_blocks = Blocks(validation->tokens.size(), context);
    if (parts.eval_blocks == 0) return TooShort(validation->path, validation->tokens.size(), context, unit);
    parts.evaluation = std::make_shared<const std::vector<Unit>>(std::move(validation->tokens));
    parts.train_end = size;
  } else {
    parts.evaluation = parts.train;
    parts.eval_blocks = HeldOut(blocks, ValidationFraction(spec.data()));
    kept = blocks - parts.eval_blocks;
    parts.eval_begin = kept * context;
    parts.train_end = parts.eval_blocks > 0 ? parts.eval_begin + 1 : size;
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

template <typename Unit>
absl::Status CheckInside(const std::string& path, absl::Span<const Unit> tokens, uint64_t first_byte,
                         uint32_t vocabulary) {
  if (vocabulary > std::numeric_limits<Unit>::max()) return absl::OkStatus();
  size_t first = tokens.size(), outside = 0;
  uint32_t largest = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < vocabulary) continue;
    if (outside++ == 0) first = i;
    largest = std::max(largest, uint32_t{tokens[i]});
  }
  if (outside == 0) return absl::OkStatus();
  const std::string others =
      outside == 1 ? "" : absl::StrCat("; so are ", outside - 1, " more tokens, the largest is ", largest);
  return absl::InvalidArgumentError(absl::StrCat(path, ": token ", uint32_t{tokens[first]}, " at byte offset ",
                                                 first_byte + first * sizeof(Unit), " (token number ", first,
                                                 ") is outside model.gpt2.vocabulary ", vocabulary, others));
}

#define SLUICE_INSTANTIATE(Unit)                                                          \
  template absl::StatusOr<std::shared_ptr<const Dataset>> MakeTokenBlocks(                \
      const v1::JobSpec&, uint32_t, const std::string&, std::unique_ptr<TokenPart<Unit>>, \
      std::unique_ptr<TokenPart<Unit>>);                                                  \
  template absl::Status CheckInside(const std::string&, absl::Span<const Unit>, uint64_t, uint32_t)
SLUICE_INSTANTIATE(uint8_t);
SLUICE_INSTANTIATE(uint16_t);
SLUICE_INSTANTIATE(uint32_t);
#undef SLUICE_INSTANTIATE

}  // namespace sluice
