// Model specs by their sizes.
#ifndef SLUICE_TESTS_COMMON_MODEL_SPECS_H_
#define SLUICE_TESTS_COMMON_MODEL_SPECS_H_

#include <cstdint>

#include "sluice/v1/job.pb.h"

namespace sluice {

inline v1::ModelSpec GptSpec(uint32_t layers, uint32_t heads, uint32_t width, uint32_t context, uint32_t vocabulary) {
  v1::ModelSpec model;
  v1::Gpt2Spec* gpt2 = model.mutable_gpt2();
  gpt2->set_layers(layers);
  gpt2->set_heads(heads);
  gpt2->set_width(width);
  gpt2->set_context(context);
  gpt2->set_vocabulary(vocabulary);
  return model;
}

}  // namespace sluice

#endif  // SLUICE_TESTS_COMMON_MODEL_SPECS_H_
