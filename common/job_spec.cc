#include "common/job_spec.h"

#include <algorithm>

#include "common/model_layout.h"
#include "common/portable_math.h"

namespace sluice {
namespace {

double BaseLearningRate(const v1::OptimizerSpec& optimizer) {
  switch (optimizer.rule_case()) {
    case v1::OptimizerSpec::kSgd:
      return optimizer.sgd().learning_rate();
    case v1::OptimizerSpec::kAdam:
      return optimizer.adam().learning_rate();
    case v1::OptimizerSpec::kAdamw:
      return optimizer.adamw().learning_rate();
    case v1::OptimizerSpec::RULE_NOT_SET:
      break;
  }
  return 0;
}

double WarmUp(double rate, uint64_t round, uint64_t warmup) {
  return rate * (static_cast<double>(round) + 1) / (static_cast<double>(warmup) + 1);
}

// Way through the decay: 0 at the end of the warm-up, 1 at `rounds` and later.
double Progress(uint64_t round, uint64_t warmup, uint64_t rounds) {
  if (round >= rounds) return 1;
  return static_cast<double>(round - warmup) / static_cast<double>(rounds - warmup);
}

void FillAdam(v1::AdamSpec* adam, double weight_decay) {
  if (!adam->has_beta1()) adam->set_beta1(0.9);
  if (!adam->has_beta2()) adam->set_beta2(0.999);
  if (!adam->has_epsilon()) adam->set_epsilon(1e-8);
  if (!adam->has_weight_decay()) adam->set_weight_decay(weight_decay);
}

void FillModel(v1::JobSpec* spec) {
  if (!spec->model().has_gpt2()) return;
  v1::Gpt2Spec* gpt2 = spec->mutable_model()->mutable_gpt2();
  if (!gpt2->has_layer_norm_epsilon()) gpt2->set_layer_norm_epsilon(1e-5);
  if (!gpt2->has_scaled_residual_init()) gpt2->set_scaled_residual_init(true);
  if (gpt2->vocabulary() == 0 && spec->data().has_text() && !spec->data().text().has_tokenizer()) {
    gpt2->set_vocabulary(256);  // token = byte
  }
}

void FillText(v1::TextSource* text) {
  if (text->documents() == v1::TextSource::DOCUMENTS_UNSPECIFIED) text->set_documents(v1::TextSource::WHOLE_FILE);
  if (text->invalid_utf8() == v1::TextSource::INVALID_UTF8_UNSPECIFIED) {
    text->set_invalid_utf8(v1::TextSource::REFUSE);
  }
}

void FillCsv(v1::CsvSource* csv) {
  if (csv->delimiter().empty()) csv->set_delimiter(",");
  if (csv->header() == v1::CsvSource::HEADER_UNSPECIFIED) csv->set_header(v1::CsvSource::AUTO);
  if (!csv->has_standardize()) csv->set_standardize(true);
}

void FillTrain(v1::TrainSpec* train) {
  if (!train->has_seed()) train->set_seed(1);
  if (!train->has_eval_every()) train->set_eval_every(std::max<uint64_t>(1, train->rounds() / 10));
  if (train->mode() == v1::TrainSpec::MODE_UNSPECIFIED) train->set_mode(v1::TrainSpec::SYNC);
  const bool async = train->mode() == v1::TrainSpec::ASYNC;
  if (train->nonfinite() == v1::TrainSpec::NON_FINITE_UNSPECIFIED) {
    train->set_nonfinite(async ? v1::TrainSpec::SKIP_CHUNK : v1::TrainSpec::SKIP_ROUND);
  }
  if (async && train->staleness_scale() == v1::TrainSpec::STALENESS_SCALE_UNSPECIFIED) {
    train->set_staleness_scale(v1::TrainSpec::NONE);
  }
  if (!train->has_max_skipped_rounds()) train->set_max_skipped_rounds(10);
}

void FillTransfer(v1::TransferSpec* transfer) {
  v1::PushSpec* push = transfer->mutable_push();
  if (push->format_case() == v1::PushSpec::FORMAT_NOT_SET) push->mutable_f32();
  if (!push->has_f32() && !push->has_error_feedback()) push->set_error_feedback(true);
  v1::PullSpec* pull = transfer->mutable_pull();
  if (pull->format_case() == v1::PullSpec::FORMAT_NOT_SET) pull->mutable_f32();
  if (transfer->host_sum() == v1::TransferSpec::HOST_SUM_UNSPECIFIED) transfer->set_host_sum(v1::TransferSpec::AUTO);
}

}  // namespace

void FillDefaults(v1::JobSpec* spec) {
  if (spec->name().empty()) {
    if (spec->model().has_gpt2()) spec->set_name("gpt2");
    if (const auto classifier = ClassifierSizesOf(spec->model())) spec->set_name(classifier->kind);
  }
  FillModel(spec);
  v1::DataSpec* data = spec->mutable_data();
  if (data->has_csv()) FillCsv(data->mutable_csv());
  if (!data->has_shuffle()) data->set_shuffle(true);
  if (!data->has_validation_fraction()) data->set_validation_fraction(0.1);
  if (data->has_text()) FillText(data->mutable_text());
  FillTrain(spec->mutable_train());
  v1::OptimizerSpec* optimizer = spec->mutable_optimizer();
  if (optimizer->has_adam()) FillAdam(optimizer->mutable_adam(), 0);
  if (optimizer->has_adamw()) FillAdam(optimizer->mutable_adamw(), 0.01);
  FillTransfer(spec->mutable_transfer());
  v1::ParallelSpec* parallel = spec->mutable_parallel();
  if (!parallel->has_data()) parallel->set_data(1);
  if (!parallel->has_tensor()) parallel->set_tensor(1);
  if (!parallel->has_pipeline()) parallel->set_pipeline(1);
  if (!parallel->has_microbatches()) parallel->set_microbatches(1);
  if (parallel->schedule() == v1::ParallelSpec::SCHEDULE_UNSPECIFIED) {
    parallel->set_schedule(v1::ParallelSpec::ONE_F_ONE_B);
  }
  v1::CheckpointSpec* checkpoint = spec->mutable_checkpoint();
  if (!checkpoint->has_every_rounds()) checkpoint->set_every_rounds(std::max<uint64_t>(1, spec->train().rounds() / 5));
  if (!checkpoint->has_keep()) checkpoint->set_keep(3);
  if (!spec->has_copies()) spec->set_copies(1);
  if (!spec->has_allow_profile_change()) spec->set_allow_profile_change(true);
}

double LearningRate(const v1::OptimizerSpec& optimizer, uint64_t round, uint64_t rounds) {
  const double rate = BaseLearningRate(optimizer);
  switch (optimizer.schedule().kind_case()) {
    case v1::ScheduleSpec::kCosine: {
      const v1::CosineSchedule& cosine = optimizer.schedule().cosine();
      if (round < cosine.warmup_rounds()) return WarmUp(rate, round, cosine.warmup_rounds());
      const double t = Progress(round, cosine.warmup_rounds(), rounds);
      return cosine.final() + 0.5 * (rate - cosine.final()) * (1 + PortableSinCos(t / 2).cos);
    }
    case v1::ScheduleSpec::kLinear: {
      const v1::LinearSchedule& linear = optimizer.schedule().linear();
      if (round < linear.warmup_rounds()) return WarmUp(rate, round, linear.warmup_rounds());
      const double t = Progress(round, linear.warmup_rounds(), rounds);
      return rate + (linear.final() - rate) * t;
    }
    case v1::ScheduleSpec::KIND_NOT_SET:
      break;
  }
  return rate;
}

bool NeedsVerdict(const v1::JobSpec& spec) {
  if (spec.train().mode() == v1::TrainSpec::ASYNC) return false;
  return spec.optimizer().clip_norm() > 0 || spec.train().nonfinite() != v1::TrainSpec::SKIP_CHUNK ||
         spec.train().drop_slowest() > 0;
}

std::vector<std::string> OptimizerSlots(const v1::OptimizerSpec& optimizer) {
  if (optimizer.has_adam() || optimizer.has_adamw()) return {"m", "v"};
  if (optimizer.sgd().momentum() > 0) return {"momentum"};
  return {};
}

std::optional<char> CsvDelimiter(std::string_view text) {
  if (text == "tab") return '\t';
  if (text.size() == 1 && std::string_view(",;|: \t").find(text[0]) != std::string_view::npos) return text[0];
  return std::nullopt;
}

void TakeTableSchema(const v1::JobSpec& checkpoint, v1::JobSpec* spec) {
  if (!checkpoint.data().csv().has_schema() || !spec->data().has_csv()) return;
  *spec->mutable_data()->mutable_csv()->mutable_schema() = checkpoint.data().csv().schema();
}

}  // namespace sluice
