// One training step's computation (forward and backward, no servers) of nanoGPT's CPU configuration: milliseconds,
// tokens and floating-point operations per second, and the part of a plain matrix product's rate that this is.
//
//   bench_train_step [--backend cpu] [--threads 1] [--seconds 5] [--layers 4 --heads 4 --width 128 --context 64
//                    --vocabulary 65 --batch 12 --dropout 0]
//
// The result is checked: the loss must fall when the gradient is followed, else the program ends with 1.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "common/philox.h"
#include "common/status_macros.h"
#include "worker/backend/backend.h"
#include "worker/model/model.h"

ABSL_FLAG(std::string, backend, "cpu", "cpu or fake_device");
ABSL_FLAG(int, threads, 1, "threads of the backend");
ABSL_FLAG(double, seconds, 5, "how long to measure");
ABSL_FLAG(int, layers, 4, "");
ABSL_FLAG(int, heads, 4, "");
ABSL_FLAG(int, width, 128, "");
ABSL_FLAG(int, context, 64, "");
ABSL_FLAG(int, vocabulary, 65, "");
ABSL_FLAG(int, batch, 12, "");
ABSL_FLAG(double, dropout, 0, "probability, as model.gpt2.dropout");

namespace sluice {
namespace {

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Times {
  double median = 0, best = 0;
};

Times Summary(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front()};
}

// The ceiling of the same run: a square product that fits the second-level cache.
absl::StatusOr<double> ProductRate(Backend* backend) {
  constexpr int64_t kN = 256;
  ASSIGN_OR_RETURN(std::shared_ptr<Buffer> buffer, backend->Allocate(3 * kN * kN * 4));
  const std::unique_ptr<Stream> stream = backend->NewStream();
  const Floats at = {buffer.get(), 0};
  std::vector<double> seconds;
  for (int i = 0; i < 200; ++i) {
    const double start = Now();
    backend->Gemm(*stream, kN, kN, kN, 1, {at, kN}, {at + kN * kN, kN}, 0, {at + 2 * kN * kN, kN});
    RETURN_IF_ERROR(backend->Synchronize(*stream));
    seconds.push_back(Now() - start);
  }
  return 2.0 * kN * kN * kN / Summary(seconds).median;
}

absl::Status Run() {
  BackendOptions options;
  options.kind = absl::GetFlag(FLAGS_backend);
  options.threads = absl::GetFlag(FLAGS_threads);
  ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, MakeBackend(options));
  v1::ModelSpec spec;
  spec.mutable_gpt2()->set_layers(absl::GetFlag(FLAGS_layers));
  spec.mutable_gpt2()->set_heads(absl::GetFlag(FLAGS_heads));
  spec.mutable_gpt2()->set_width(absl::GetFlag(FLAGS_width));
  spec.mutable_gpt2()->set_context(absl::GetFlag(FLAGS_context));
  spec.mutable_gpt2()->set_vocabulary(absl::GetFlag(FLAGS_vocabulary));
  spec.mutable_gpt2()->set_layer_norm_epsilon(1e-5);
  spec.mutable_gpt2()->set_dropout(absl::GetFlag(FLAGS_dropout));
  ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, MakeModel(spec, backend.get()));
  for (const Tensor& tensor : model->space().tensors()) {
    FillInitial(tensor, 1, 0, tensor.elements, model->parameters() + tensor.offset);
  }
  model->ParametersChanged({0, model->space().size()});

  Batch batch;
  batch.rows = absl::GetFlag(FLAGS_batch);
  batch.length = absl::GetFlag(FLAGS_context);
  batch.count = batch.rows * batch.length;
  const auto token = [&](uint64_t i) {
    return static_cast<int32_t>(Permute(i % 1000, 1000, 7) % absl::GetFlag(FLAGS_vocabulary));
  };
  for (int64_t i = 0; i < batch.count; ++i) {
    batch.tokens.push_back(token(i));
    batch.targets.push_back(token(i + 1));
  }
  const std::vector<Batch> batches = {batch};
  ASSIGN_OR_RETURN(const LossSum before, model->ForwardBackward(batches, nullptr, nullptr, nullptr));
  double squares = 0;
  for (uint64_t i = 0; i < model->space().size(); ++i) squares += std::pow(double{model->gradients()[i]}, 2);
  const double step = 0.05 * before.loss / squares;
  for (uint64_t i = 0; i < model->space().size(); ++i) {
    model->parameters()[i] -= static_cast<float>(step * model->gradients()[i]);
  }
  model->ParametersChanged({0, model->space().size()});
  ASSIGN_OR_RETURN(const LossSum after, model->Evaluate(batch, nullptr));

  std::vector<double> seconds;
  const double end = Now() + absl::GetFlag(FLAGS_seconds);
  while (Now() < end || seconds.size() < 5) {
    const double start = Now();
    RETURN_IF_ERROR(model->ForwardBackward(batches, nullptr, nullptr, nullptr).status());
    seconds.push_back(Now() - start);
  }
  ASSIGN_OR_RETURN(const double ceiling, ProductRate(backend.get()));
  // Three products (forward, two of the gradient) per weight and token; attention counts what causality leaves.
  const double c = absl::GetFlag(FLAGS_width), layers = absl::GetFlag(FLAGS_layers), n = batch.count;
  const double weights = layers * 12 * c * c + absl::GetFlag(FLAGS_vocabulary) * c;
  const double operations = 6 * n * weights + layers * 6 * n * c * (batch.length + 1);
  const Times times = Summary(seconds);
  std::printf("%s: %zu parameters, %lld tokens a step, %zu steps\n", backend->numeric_profile().c_str(),
              static_cast<size_t>(model->space().size()), static_cast<long long>(batch.count), seconds.size());
  std::printf("median %.2f ms, best %.2f ms; %.0f tokens/s; %.1f GFLOP/s, %.0f%% of a 256-cubed product's %.1f\n",
              times.median * 1e3, times.best * 1e3, n / times.median, operations / times.median * 1e-9,
              100 * operations / times.median / ceiling, ceiling * 1e-9);
  std::printf("loss %.6f, after a step along the gradient %.6f\n", before.loss / before.count,
              after.loss / after.count);
  if (!(after.loss < before.loss)) return absl::DataLossError("the loss did not fall: the gradient is wrong");
  return absl::OkStatus();
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = sluice::Run();
  if (!status.ok()) std::fprintf(stderr, "bench_train_step: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
