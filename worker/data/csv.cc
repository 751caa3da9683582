// Tables as a data set. Held out, where no validation file is named, are rows drawn from all of the table by a fixed
// permutation: tables are often sorted by class. The rest is the training part, whose means and deviations standardize
// both; they come with the spec (data.csv.schema) where somebody has read the file before, or where the parameters are
// a checkpoint's.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/philox.h"
#include "common/status_macros.h"
#include "worker/data/file.h"
#include "worker/data/sources.h"
#include "worker/data/table.h"

namespace sluice {
namespace {

// Samples ready for the model.
struct Samples {
  std::vector<float> features;  // [rows, inputs]
  std::vector<int32_t> labels;  // [rows]
};

class CsvDataset : public Dataset {
 public:
  CsvDataset(Samples train, Samples evaluation, v1::TableSchema schema, const v1::JobSpec& spec)
      : train_(std::move(train)),
        evaluation_(std::move(evaluation)),
        schema_(std::move(schema)),
        inputs_(static_cast<uint64_t>(schema_.features_size())),
        order_(train_.labels.size(), SeedOf(spec), Shuffles(spec.data())) {}

  uint64_t train_samples() const override { return order_.samples(); }
  uint64_t eval_samples() const override { return evaluation_.labels.size(); }

  Batch Train(Range positions) const override {
    Batch batch = Start(positions);
    order_.ForEach(positions, [&](const EpochOrder::Epoch&, uint64_t sample) { Append(train_, sample, &batch); });
    return batch;
  }

  Batch Evaluation(Range samples) const override {
    Batch batch = Start(samples);
    for (uint64_t i = samples.begin; i < samples.end; ++i) Append(evaluation_, i, &batch);
    return batch;
  }

  uint32_t vocabulary() const override { return 0; }
  uint64_t inputs() const override { return inputs_; }
  uint32_t classes() const override { return std::max(2u, static_cast<uint32_t>(schema_.labels_size())); }
  const v1::TableSchema* table() const override { return &schema_; }

 private:
  Batch Start(Range range) const {
    Batch batch;
    batch.rows = batch.count = static_cast<int64_t>(range.size());
    batch.features.reserve(range.size() * inputs_);
    batch.labels.reserve(range.size());
    return batch;
  }

  void Append(const Samples& from, uint64_t sample, Batch* batch) const {
    const float* row = from.features.data() + sample * inputs_;
    batch->features.insert(batch->features.end(), row, row + inputs_);
    batch->labels.push_back(from.labels[sample]);
  }

  const Samples train_, evaluation_;
  const v1::TableSchema schema_;
  const uint64_t inputs_;
  const EpochOrder order_;
};

absl::StatusOr<Samples> Prepare(const Table& table, const std::vector<uint64_t>& rows, const v1::TableSchema& schema) {
  ASSIGN_OR_RETURN(const std::vector<int32_t> classes, ClassesOf(table, schema));
  const size_t inputs = table.inputs();
  Samples samples;
  samples.features.reserve(rows.size() * inputs);
  samples.labels.reserve(rows.size());
  for (const uint64_t row : rows) {
    for (size_t j = 0; j < inputs; ++j) {
      double value = table.values[row * inputs + j];
      if (schema.mean_size() > 0) {
        value = (value - schema.mean(static_cast<int>(j))) / schema.deviation(static_cast<int>(j));
      }
      const float narrow = static_cast<float>(value);
      if (!std::isfinite(narrow)) {
        return absl::InvalidArgumentError(
            absl::StrCat(table.path, ":", table.lines[row], ": column ", table.feature_columns[j] + 1, ": ",
                         table.values[row * inputs + j], " is far outside of what was trained on"));
      }
      samples.features.push_back(narrow);
    }
    samples.labels.push_back(classes[table.labels[row]]);
  }
  return samples;
}

// Training rows and held-out rows, both in file order.
void Split(uint64_t rows, uint64_t held, std::vector<uint64_t>* train, std::vector<uint64_t>* evaluation) {
  std::vector<bool> out(rows, false);
  for (uint64_t i = 0; i < held; ++i) out[Permute(i, rows, StreamKey(0, "held-out"))] = true;
  for (uint64_t row = 0; row < rows; ++row) (out[row] ? evaluation : train)->push_back(row);
}

absl::Status CheckModel(const std::string& path, const v1::TableSchema& schema, const ClassifierSizes& model) {
  const uint64_t inputs = static_cast<uint64_t>(schema.features_size());
  const uint64_t classes = static_cast<uint64_t>(schema.labels_size());
  if (model.inputs != 0 && model.inputs != inputs) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", inputs, " columns of features, but model.", model.kind, ".inputs is ", model.inputs));
  }
  if (model.classes == 0 || classes <= model.classes) return absl::OkStatus();
  if (model.kind == "logistic") {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": ", classes, " classes, but model.logistic tells two apart; use model.softmax or model.mlp"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", classes, " classes, but model.", model.kind, ".classes is ", model.classes));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Dataset>> OpenCsv(const v1::JobSpec& spec, const std::string& data_root) {
  ASSIGN_OR_RETURN(const ClassifierSizes model, CheckDenseModel(spec, "data.csv holds features and classes"));
  const v1::CsvSource& source = spec.data().csv();
  if (source.label().empty()) {
    return absl::InvalidArgumentError(
        "data.csv.label: the name or the index of the class's column is expected, found none");
  }
  ASSIGN_OR_RETURN(const std::string path, ResolveDataPath(source.path(), data_root, "data.csv.path"));
  ASSIGN_OR_RETURN(const Table table, ReadTable(path, source));
  const bool held_in_file = source.validation_path().empty();
  std::vector<uint64_t> train_rows, eval_rows;
  Split(table.rows(), held_in_file ? HeldOut(table.rows(), ValidationFraction(spec.data())) : 0, &train_rows,
        &eval_rows);

  v1::TableSchema schema = source.schema();
  if (!source.has_schema()) {
    ASSIGN_OR_RETURN(schema, MakeSchema(table, train_rows, !source.has_standardize() || source.standardize()));
  }
  RETURN_IF_ERROR(CheckModel(path, schema, model));
  RETURN_IF_ERROR(CheckColumns(table, schema));
  ASSIGN_OR_RETURN(Samples train, Prepare(table, train_rows, schema));
  Samples evaluation;
  if (held_in_file) {
    ASSIGN_OR_RETURN(evaluation, Prepare(table, eval_rows, schema));
  } else {
    ASSIGN_OR_RETURN(const std::string validation_path,
                     ResolveDataPath(source.validation_path(), data_root, "data.csv.validation_path"));
    ASSIGN_OR_RETURN(const Table validation, ReadTable(validation_path, source));
    RETURN_IF_ERROR(CheckColumns(validation, schema));
    eval_rows.resize(validation.rows());
    std::iota(eval_rows.begin(), eval_rows.end(), uint64_t{0});
    ASSIGN_OR_RETURN(evaluation, Prepare(validation, eval_rows, schema));
  }
  return std::make_shared<const CsvDataset>(std::move(train), std::move(evaluation), std::move(schema), spec);
}

}  // namespace sluice
