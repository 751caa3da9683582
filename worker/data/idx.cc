// IDX images and labels, the format of MNIST (http://yann.lecun.com/exdb/mnist): big-endian magic 00 00 TYPE
// DIMENSIONS, the dimensions as uint32, then the elements. Raw or gzip, told apart by the first bytes and not by the
// name.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "worker/data/file.h"
#include "worker/data/sources.h"

namespace sluice {
namespace {

constexpr uint32_t kImagesMagic = 0x00000803;  // unsigned bytes, 3 dimensions
constexpr uint32_t kLabelsMagic = 0x00000801;

struct Array {
  std::vector<uint64_t> shape;
  std::vector<uint8_t> values;
};

absl::Status BadMagic(const std::string& path, uint32_t found, uint32_t wanted, const char* kind) {
  std::string hint;
  const uint32_t swapped = __builtin_bswap32(found);
  if (swapped == kImagesMagic || swapped == kLabelsMagic) {
    hint = "; the header is little-endian, IDX is big-endian: write the file anew";
  } else if (found == kLabelsMagic) {
    hint = "; these are labels, images are expected here";
  } else if (found == kImagesMagic) {
    hint = "; these are images, labels are expected here";
  } else if (found >> 16 == 0 && (found >> 8) >= 0x09 && (found >> 8) <= 0x0e) {
    hint = absl::StrFormat("; element type 0x%02x, only unsigned bytes (0x08) are read", found >> 8);
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: magic 0x%08x expected for IDX %s, found 0x%08x%s", path, wanted, kind, found, hint));
}

// The next n bytes of the header, which begin at `offset`.
absl::Status ReadHeader(const std::string& path, PackedReader* reader, size_t offset, uint8_t* out, size_t n) {
  ASSIGN_OR_RETURN(const size_t got, reader->Read(out, n));
  if (got == n) return absl::OkStatus();
  if (offset + got == 0) return absl::DataLossError(absl::StrCat(path, ": the file is empty"));
  return absl::DataLossError(absl::StrCat(path, ": the file ends within the IDX header, after ", offset + got,
                                          " bytes; it is cut off: fetch it again"));
}

uint32_t BigEndian(const uint8_t* b) { return uint32_t{b[0]} << 24 | b[1] << 16 | b[2] << 8 | b[3]; }

// Reads exactly `bytes` elements and checks that nothing follows. Memory grows with what the file really holds.
absl::Status ReadValues(const std::string& path, PackedReader* reader, uint64_t bytes, std::vector<uint8_t>* values) {
  constexpr uint64_t kStep = 1 << 24;
  while (values->size() < bytes) {
    const size_t have = values->size(), step = std::min(bytes - have, kStep);
    values->resize(have + step);
    ASSIGN_OR_RETURN(const size_t got, reader->Read(values->data() + have, step));
    if (got < step) {
      return absl::DataLossError(absl::StrCat(path, ": the header says ", bytes, " bytes of elements, ", have + got,
                                              " are present; the file is cut off: fetch it again"));
    }
  }
  std::vector<uint8_t> more(1 << 16);
  uint64_t trailing = 0;
  for (size_t got = 1; got > 0 && trailing < kStep; trailing += got) {
    ASSIGN_OR_RETURN(got, reader->Read(more.data(), more.size()));
  }
  if (trailing > 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", trailing >= kStep ? "at least " : "", trailing,
                                                   " trailing bytes after the ", bytes, " that the header says"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Array> ReadIdx(const std::string& path, uint32_t wanted, const char* kind) {
  ASSIGN_OR_RETURN(auto reader, PackedReader::Open(path));
  uint8_t head[4];
  RETURN_IF_ERROR(ReadHeader(path, reader.get(), 0, head, 4));
  const uint32_t magic = BigEndian(head);
  if (magic != wanted) return BadMagic(path, magic, wanted, kind);
  Array array;
  uint64_t elements = 1;
  for (uint32_t d = 0; d < (magic & 0xff); ++d) {
    RETURN_IF_ERROR(ReadHeader(path, reader.get(), 4 + 4 * d, head, 4));
    array.shape.push_back(BigEndian(head));
    if (__builtin_mul_overflow(elements, array.shape.back(), &elements) || elements > uint64_t{1} << 47) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": the dimensions ", absl::StrJoin(array.shape, " x "),
                                                     (magic & 0xff) > d + 1 ? " x ..." : "",
                                                     " are too large to be true; the header is damaged"));
    }
  }
  if (elements == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the dimensions ", absl::StrJoin(array.shape, " x "), " hold no elements"));
  }
  RETURN_IF_ERROR(ReadValues(path, reader.get(), elements, &array.values));
  return array;
}

// Images with their labels.
struct Split {
  uint64_t samples = 0, inputs = 0;
  std::vector<uint8_t> pixels, labels;
  uint32_t classes() const { return *std::max_element(labels.begin(), labels.end()) + 1u; }
};

absl::StatusOr<std::shared_ptr<const Split>> ReadSplit(const std::string& images, const std::string& labels,
                                                       const ClassifierSizes& model) {
  ASSIGN_OR_RETURN(Array x, ReadIdx(images, kImagesMagic, "images"));
  ASSIGN_OR_RETURN(Array y, ReadIdx(labels, kLabelsMagic, "labels"));
  if (x.shape[0] != y.shape[0]) {
    return absl::InvalidArgumentError(absl::StrCat(images, " holds ", x.shape[0], " images, ", labels, " ", y.shape[0],
                                                   " labels; one each is expected"));
  }
  auto split = std::make_shared<Split>();
  split->samples = x.shape[0];
  split->inputs = x.shape[1] * x.shape[2];
  split->pixels = std::move(x.values);
  split->labels = std::move(y.values);
  if (model.inputs != 0 && model.inputs != split->inputs) {
    return absl::InvalidArgumentError(absl::StrCat(images, ": images of ", x.shape[1], " x ", x.shape[2], " = ",
                                                   split->inputs, " pixels, but model.", model.kind, ".inputs is ",
                                                   model.inputs));
  }
  for (uint64_t i = 0; model.classes != 0 && i < split->samples; ++i) {
    if (split->labels[i] >= model.classes) {
      return absl::InvalidArgumentError(
          absl::StrCat(labels, ": label ", int{split->labels[i]}, " of sample ", i, " is outside ",
                       model.kind == "logistic" ? "the two classes, 0 and 1, of model.logistic"
                                                : absl::StrCat("model.", model.kind, ".classes ", model.classes)));
    }
  }
  return std::shared_ptr<const Split>(std::move(split));
}

class IdxDataset : public Dataset {
 public:
  IdxDataset(std::shared_ptr<const Split> train, std::shared_ptr<const Split> evaluation, uint64_t train_samples,
             uint64_t eval_first, uint64_t eval_samples, const v1::JobSpec& spec)
      : train_(std::move(train)),
        evaluation_(std::move(evaluation)),
        eval_first_(eval_first),
        eval_samples_(eval_samples),
        classes_(std::max(2u, std::max(train_->classes(), evaluation_->classes()))),
        order_(train_samples, SeedOf(spec), Shuffles(spec.data())) {}

  uint64_t train_samples() const override { return order_.samples(); }
  uint64_t eval_samples() const override { return eval_samples_; }

  Batch Train(Range positions) const override {
    Batch batch = Start(positions);
    order_.ForEach(positions, [&](const EpochOrder::Epoch&, uint64_t sample) { Append(*train_, sample, &batch); });
    return batch;
  }

  Batch Evaluation(Range samples) const override {
    Batch batch = Start(samples);
    for (uint64_t i = samples.begin; i < samples.end; ++i) Append(*evaluation_, eval_first_ + i, &batch);
    return batch;
  }

  uint32_t vocabulary() const override { return 0; }
  uint64_t inputs() const override { return train_->inputs; }
  uint32_t classes() const override { return classes_; }

 private:
  Batch Start(Range range) const {
    Batch batch;
    batch.rows = batch.count = static_cast<int64_t>(range.size());
    batch.features.reserve(range.size() * train_->inputs);
    batch.labels.reserve(range.size());
    return batch;
  }

  static void Append(const Split& from, uint64_t sample, Batch* batch) {
    const uint8_t* pixels = from.pixels.data() + sample * from.inputs;
    for (uint64_t i = 0; i < from.inputs; ++i) batch->features.push_back(static_cast<float>(pixels[i]) / 255.0f);
    batch->labels.push_back(from.labels[sample]);
  }

  const std::shared_ptr<const Split> train_, evaluation_;
  const uint64_t eval_first_, eval_samples_;
  const uint32_t classes_;
  const EpochOrder order_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const Dataset>> OpenIdx(const v1::JobSpec& spec, const std::string& data_root) {
  ASSIGN_OR_RETURN(const ClassifierSizes model, CheckDenseModel(spec, "data.idx holds images"));
  const v1::IdxSource& source = spec.data().idx();
  if (source.validation_images().empty() != source.validation_labels().empty()) {
    return absl::InvalidArgumentError(
        "data.idx: validation_images and validation_labels are given together or not at all");
  }
  ASSIGN_OR_RETURN(const std::string images, ResolveDataPath(source.images(), data_root, "data.idx.images"));
  ASSIGN_OR_RETURN(const std::string labels, ResolveDataPath(source.labels(), data_root, "data.idx.labels"));
  ASSIGN_OR_RETURN(auto train, ReadSplit(images, labels, model));
  if (!source.validation_images().empty()) {
    ASSIGN_OR_RETURN(const std::string held_images,
                     ResolveDataPath(source.validation_images(), data_root, "data.idx.validation_images"));
    ASSIGN_OR_RETURN(const std::string held_labels,
                     ResolveDataPath(source.validation_labels(), data_root, "data.idx.validation_labels"));
    ASSIGN_OR_RETURN(auto held, ReadSplit(held_images, held_labels, model));
    if (held->inputs != train->inputs) {
      return absl::InvalidArgumentError(absl::StrCat(held_images, ": images of ", held->inputs,
                                                     " pixels, but those of ", images, " have ", train->inputs));
    }
    const uint64_t train_samples = train->samples, eval_samples = held->samples;
    return std::make_shared<const IdxDataset>(std::move(train), std::move(held), train_samples, 0, eval_samples, spec);
  }
  const uint64_t held = HeldOut(train->samples, ValidationFraction(spec.data()));
  const uint64_t kept = train->samples - held;
  return std::make_shared<const IdxDataset>(train, train, kept, kept, held, spec);
}

}  // namespace sluice
