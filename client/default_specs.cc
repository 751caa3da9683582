#include "client/default_specs.h"

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "client/spec_loading.h"
#include "common/job_spec.h"
#include "common/status_macros.h"
#include "worker/data/dataset.h"

namespace sluice {
namespace {

constexpr uint64_t kSmallTable = 1000;  // rows below which a linear model is the better bet

absl::Status Set(const std::vector<std::string>& sets, v1::JobSpec* spec) {
  for (const std::string& set : sets) {
    const absl::Status status = SetSpecField(spec, set);
    if (!status.ok()) return absl::Status(status.code(), absl::StrCat("--set ", status.message()));
  }
  return absl::OkStatus();
}

// A sixteenth of the samples, rounded down to a power of two, 1 to 64.
uint32_t BatchFor(uint64_t samples) {
  uint32_t batch = 1;
  while (batch < 64 && batch * 2 <= samples / 16) batch *= 2;
  return batch;
}

std::string NameOf(const v1::DataSpec& data) {
  const std::string path = data.has_csv() ? data.csv().path() : data.idx().images();
  std::string name = std::filesystem::path(path).filename().string();
  return JobNameFrom(name.substr(0, name.find('.')));
}

}  // namespace

absl::StatusOr<DefaultSpec> DefaultClassifierSpec(const v1::DataSpec& data, const std::vector<std::string>& sets) {
  v1::JobSpec asked;
  *asked.mutable_data() = data;
  RETURN_IF_ERROR(Set(sets, &asked));
  if (!asked.data().has_csv() && !asked.data().has_idx()) {
    return absl::InvalidArgumentError("--set data: another kind of data needs a spec that says what model learns it");
  }
  asked.clear_model();
  asked.mutable_model()->mutable_softmax();  // takes whatever sizes there are
  ASSIGN_OR_RETURN(const auto opened, OpenDataset(asked, ""));
  const uint64_t samples = opened->train_samples();

  DefaultSpec made;
  v1::JobSpec& spec = made.spec;
  spec.set_name(NameOf(asked.data()));
  *spec.mutable_data() = data;
  double rate = 1e-3;
  uint64_t epochs = 20;
  if (asked.data().has_idx()) {
    spec.mutable_model()->mutable_mlp()->add_hidden(256);
  } else if (samples + opened->eval_samples() >= kSmallTable) {
    spec.mutable_model()->mutable_mlp()->add_hidden(64);
    epochs = 60;
  } else {
    if (opened->classes() == 2) {
      spec.mutable_model()->mutable_logistic();
    } else {
      spec.mutable_model()->mutable_softmax();
    }
    rate = 1e-2;
    epochs = 60;
  }
  const uint32_t batch = BatchFor(samples);
  const uint64_t rounds = std::clamp<uint64_t>(epochs * samples / batch, 200, 20000);
  spec.mutable_train()->set_rounds(rounds);
  spec.mutable_train()->set_batch(batch);
  spec.mutable_optimizer()->mutable_adamw()->set_learning_rate(rate);
  v1::CosineSchedule* cosine = spec.mutable_optimizer()->mutable_schedule()->mutable_cosine();
  cosine->set_warmup_rounds(rounds / 20);
  cosine->set_final(rate / 100);

  v1::JobSpec shown = spec;
  RETURN_IF_ERROR(Set(sets, &shown));
  made.yaml = JobSpecToYaml(shown);
  const uint64_t classes =
      opened->table() != nullptr ? static_cast<uint64_t>(opened->table()->labels_size()) : uint64_t{opened->classes()};
  made.description =
      absl::StrCat(samples, " training samples of ", opened->inputs(), " features in ", classes,
                   classes == 1 ? " class (nothing to tell apart), " : " classes, ", opened->eval_samples(),
                   asked.data().csv().validation_path().empty() && asked.data().idx().validation_images().empty()
                       ? " held out"
                       : " for validation");
  return made;
}

}  // namespace sluice
