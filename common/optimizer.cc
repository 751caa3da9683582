#include "common/optimizer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>

#include "common/job_spec.h"
#include "common/optimizer_kernels.h"
#include "common/portable_math.h"

namespace sluice {
namespace {

using kernels::Table;

std::vector<const Table*> RunnableTables() {
  __builtin_cpu_init();
  std::vector<const Table*> tables = {&kernels::kTableV2};
  if (__builtin_cpu_supports("x86-64-v3")) tables.push_back(&kernels::kTableV3);
  if (__builtin_cpu_supports("x86-64-v4")) tables.push_back(&kernels::kTableV4);
  return tables;
}

std::atomic<const Table*>& Chosen() {
  static std::atomic<const Table*> chosen{RunnableTables().back()};
  return chosen;
}

const Table& Kernels() { return *Chosen().load(std::memory_order_relaxed); }

// nullptr where the rule is not of Adam's family.
const v1::AdamSpec* AdamOf(const v1::OptimizerSpec& optimizer) {
  if (optimizer.has_adam()) return &optimizer.adam();
  if (optimizer.has_adamw()) return &optimizer.adamw();
  return nullptr;
}

}  // namespace

int SlotCount(UpdateRule::Kind kind) {
  switch (kind) {
    case UpdateRule::kSgd:
      return 0;
    case UpdateRule::kMomentum:
      return 1;
    case UpdateRule::kAdam:
    case UpdateRule::kAdamW:
      return 2;
  }
  return 0;
}

UpdateRule MakeUpdateRule(const v1::OptimizerSpec& optimizer, uint64_t round, uint64_t rounds) {
  return MakeUpdateRule(optimizer, round, rounds, round, 1);
}

UpdateRule MakeUpdateRule(const v1::OptimizerSpec& optimizer, uint64_t round, uint64_t rounds, uint64_t step,
                          double rate_scale) {
  UpdateRule rule;
  rule.learning_rate = static_cast<float>(LearningRate(optimizer, round, rounds) * rate_scale);
  const v1::AdamSpec* adam = AdamOf(optimizer);
  if (adam == nullptr) {
    rule.momentum = static_cast<float>(optimizer.sgd().momentum());
    rule.kind = rule.momentum > 0 ? UpdateRule::kMomentum : UpdateRule::kSgd;
    return rule;
  }
  rule.kind = optimizer.has_adamw() ? UpdateRule::kAdamW : UpdateRule::kAdam;
  const double beta1 = adam->has_beta1() ? adam->beta1() : 0.9;
  const double beta2 = adam->has_beta2() ? adam->beta2() : 0.999;
  rule.beta1 = static_cast<float>(beta1);
  rule.beta2 = static_cast<float>(beta2);
  rule.rest1 = static_cast<float>(1 - beta1);
  rule.rest2 = static_cast<float>(1 - beta2);
  rule.epsilon = static_cast<float>(adam->has_epsilon() ? adam->epsilon() : 1e-8);
  const double default_decay = optimizer.has_adamw() ? 0.01 : 0;
  rule.weight_decay = static_cast<float>(adam->has_weight_decay() ? adam->weight_decay() : default_decay);
  rule.bias1 = static_cast<float>(1 - PortablePower(beta1, step + 1));
  rule.bias2_sqrt = static_cast<float>(std::sqrt(1 - PortablePower(beta2, step + 1)));
  return rule;
}

void ApplyUpdate(const UpdateRule& rule, bool decay, float gradient_scale, const float* gradient_sum,
                 const float* value, float* new_value, float* slot0, float* slot1, size_t n) {
  kernels::UpdateConstants c;
  c.scale = gradient_scale;
  c.step = rule.learning_rate;
  switch (rule.kind) {
    case UpdateRule::kSgd:
      return Kernels().sgd(c, gradient_sum, value, new_value, n);
    case UpdateRule::kMomentum:
      c.momentum = rule.momentum;
      return Kernels().momentum(c, gradient_sum, value, new_value, slot0, n);
    case UpdateRule::kAdam:
    case UpdateRule::kAdamW:
      break;
  }
  const double learning_rate = rule.learning_rate, weight_decay = decay ? rule.weight_decay : 0;
  c.step = static_cast<float>(learning_rate / rule.bias1);
  c.beta1 = rule.beta1;
  c.beta2 = rule.beta2;
  c.rest1 = rule.rest1;
  c.rest2 = rule.rest2;
  c.epsilon = rule.epsilon;
  c.bias2_sqrt = rule.bias2_sqrt;
  if (rule.kind == UpdateRule::kAdam) {
    c.l2 = static_cast<float>(weight_decay);
  } else {
    c.keep = static_cast<float>(1 - learning_rate * weight_decay);
  }
  Kernels().adam(c, gradient_sum, value, new_value, slot0, slot1, n);
}

int AddAndCheck(const void* a, const void* b, float* out, size_t n) { return Kernels().add_and_check(a, b, out, n); }

bool AllFinite(const void* x, size_t n) { return Kernels().all_finite(x, n); }

double SumOfSquares(const float* x, size_t n) {
  SquareSum sum;
  sum.Add(x, n);
  return sum.Total();
}

void SquareSum::Add(const float* x, size_t n) { Kernels().add_squares(x, n, lanes_); }

// Lane l takes lane l + 8, then + 4, + 2, + 1.
double SquareSum::Total() const {
  double lane[16];
  std::copy(std::begin(lanes_), std::end(lanes_), lane);
  for (size_t width = 8; width > 0; width /= 2) {
    for (size_t l = 0; l < width; ++l) lane[l] += lane[l + width];
  }
  return lane[0];
}

std::vector<std::string> DispatchTargets() {
  std::vector<std::string> names;
  for (const Table* table : RunnableTables()) names.emplace_back(table->name);
  return names;
}

void ForceDispatchTarget(const std::string& name) {
  const std::vector<const Table*> tables = RunnableTables();
  const Table* chosen = tables.back();
  for (const Table* table : tables) {
    if (table->name == name) chosen = table;
  }
  Chosen().store(chosen, std::memory_order_relaxed);
}

}  // namespace sluice
