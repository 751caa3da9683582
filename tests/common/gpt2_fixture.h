// A small GPT-2 with random parameters, for tests of Hugging Face folders.
#ifndef SLUICE_TESTS_COMMON_GPT2_FIXTURE_H_
#define SLUICE_TESTS_COMMON_GPT2_FIXTURE_H_

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "common/gpt2_folder.h"
#include "common/model_layout.h"
#include "common/safetensors.h"

namespace sluice {

inline std::string Text(const absl::Status& status) { return std::string(status.message()); }

inline v1::Gpt2Spec SmallSpec(uint32_t width = 6) {
  v1::Gpt2Spec spec;
  spec.set_layers(2);
  spec.set_heads(2);
  spec.set_width(width);
  spec.set_context(5);
  spec.set_vocabulary(11);
  spec.set_layer_norm_epsilon(1e-5);
  return spec;
}

inline ParameterSpace SpaceOf(const v1::Gpt2Spec& spec) {
  v1::ModelSpec model;
  *model.mutable_gpt2() = spec;
  return *MakeParameterSpace(model);
}

inline std::vector<float> RandomValues(uint64_t n, uint32_t seed = 3) {
  std::mt19937 random(seed);
  std::vector<float> values(n);
  for (float& x : values) x = static_cast<float>(random()) * 0x1p-32f - 0.5f;
  return values;
}

inline std::vector<float> ReadWhole(const Gpt2FolderReader& reader, uint64_t n) {
  std::vector<float> values(n);
  const absl::Status status = reader.Read(0, absl::MakeSpan(values));
  EXPECT_TRUE(status.ok()) << status;
  return values;
}

// The parameters of a folder that must be good.
inline std::vector<float> Import(const std::string& folder, const v1::Gpt2Spec& spec) {
  const auto reader = Gpt2FolderReader::Open(folder, spec);
  EXPECT_TRUE(reader.ok()) << reader.status();
  return reader.ok() ? ReadWhole(**reader, SpaceOf(spec).size()) : std::vector<float>();
}

inline std::vector<float> Floats(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsTensor* const tensor = file.Find(name);
  EXPECT_NE(tensor, nullptr) << name;
  if (tensor == nullptr) return {};
  std::vector<float> values(tensor->elements);
  EXPECT_TRUE(file.ReadFloats(*tensor, 0, absl::MakeSpan(values)).ok());
  return values;
}

}  // namespace sluice

#endif  // SLUICE_TESTS_COMMON_GPT2_FIXTURE_H_
