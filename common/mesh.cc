#include "common/mesh.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace sluice {
namespace {

using Wide = unsigned __int128;

// Layers that can be dealt to stages; 0 where the model has none.
uint64_t LayersOf(const v1::ModelSpec& model) {
  switch (model.kind_case()) {
    case v1::ModelSpec::kGpt2:
      return model.gpt2().layers();
    case v1::ModelSpec::kMlp:
      return static_cast<uint64_t>(model.mlp().hidden_size()) + 1;
    default:
      return 1;
  }
}

// The allowed value nearest to `found`, the smaller one of two.
template <typename Allowed>
uint32_t Nearest(uint32_t found, uint32_t most, Allowed allowed) {
  uint32_t best = 1;
  for (uint32_t value = 1; value <= most; ++value) {
    const auto distance = [found](uint32_t v) { return v > found ? v - found : found - v; };
    if (allowed(value) && distance(value) < distance(best)) best = value;
  }
  return best;
}

std::string Refusal(const char* field, uint32_t found, const std::string& limit, uint32_t nearest) {
  return absl::StrCat(field, ": found ", found, "; ", limit, "; the nearest value allowed is ", nearest);
}

// The sums of costs from layer 0 on, so that those of a stage are a difference.
struct Costs {
  std::vector<uint64_t> before;
  uint64_t first = 0, last = 0;

  size_t layers() const { return before.size() - 1; }
  uint64_t Of(size_t begin, size_t end) const {
    return before[end] - before[begin] + (begin == 0 ? first : 0) + (end == layers() ? last : 0);
  }
};

bool Fits(const Costs& costs, uint32_t stages, uint64_t bound) {
  size_t begin = 0;
  for (uint32_t stage = 0; stage < stages; ++stage) {
    const size_t most = costs.layers() - (stages - stage - 1);  // the stages behind need a layer each
    size_t end = begin + 1;
    if (end > most || costs.Of(begin, end) > bound) return false;
    while (end < most && costs.Of(begin, end + 1) <= bound) ++end;
    begin = end;
  }
  return begin == costs.layers();
}

// Which stages hold a tensor.
struct Holders {
  uint32_t first = 0;
  uint32_t last = 0;  // another one that holds it too, or the same
};

class Dealt {
 public:
  Dealt(const v1::ModelSpec& model, const Mesh& mesh) : mesh_(mesh) {
    if (mesh.pipeline == 1) return;
    for (const Range& layers : StageLayers(model, mesh.pipeline)) ends_.push_back(layers.end);
  }

  Holders Of(const std::string& tensor) const {
    const uint32_t last = mesh_.pipeline - 1;
    if (ends_.empty() || tensor == "wpe") return {0, 0};
    if (tensor == "wte") return {0, last};
    absl::string_view name = tensor;
    uint64_t layer = 0;
    if (!absl::ConsumePrefix(&name, "h.") && !absl::ConsumePrefix(&name, "layer.")) return {last, last};  // ln_f
    if (!absl::SimpleAtoi(name.substr(0, name.find('.')), &layer)) return {last, last};
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), layer);
    const uint32_t stage = static_cast<uint32_t>(end - ends_.begin());
    return {stage, stage};
  }

 private:
  const Mesh mesh_;
  std::vector<uint64_t> ends_;  // by stage: one past its last layer; empty: one stage
};

// Visits every piece of the space that lies on one set of ranks: (range, holders, tensor rank or -1 for all of them).
template <typename Visit>
void ForEachPiece(const v1::ModelSpec& model, const ParameterSpace& space, const Mesh& mesh, Visit visit) {
  const Dealt dealt(model, mesh);
  for (const Tensor& tensor : space.tensors()) {
    const Holders holders = dealt.Of(tensor.name);
    if (!tensor.cut || mesh.tensor == 1) {
      visit(Range{tensor.offset, tensor.offset + tensor.elements}, holders, mesh.tensor == 1 ? 0 : -1);
      continue;
    }
    const uint64_t row = tensor.shape[0] == 0 ? 0 : tensor.elements / tensor.shape[0];
    for (uint32_t t = 0; t < mesh.tensor; ++t) {
      const Range rows = PartOf(tensor.shape[0], mesh.tensor, t);
      visit(Range{tensor.offset + rows.begin * row, tensor.offset + rows.end * row}, holders, static_cast<int>(t));
    }
  }
}

}  // namespace

Range PartOf(uint64_t n, uint32_t parts, uint32_t part) {
  const uint64_t each = n / parts, larger = n % parts;
  const uint64_t begin = each * part + std::min<uint64_t>(part, larger);
  return {begin, begin + each + (part < larger ? 1 : 0)};
}

Mesh MeshOf(const v1::ParallelSpec& parallel) {
  return {.data = std::max(1u, parallel.data()),
          .pipeline = std::max(1u, parallel.pipeline()),
          .tensor = std::max(1u, parallel.tensor()),
          .sequence_parallel = parallel.sequence_parallel()};
}

std::string MeshText(const Mesh& mesh) {
  return absl::StrCat("parallel.data ", mesh.data, " x pipeline ", mesh.pipeline, " x tensor ", mesh.tensor);
}

absl::Status CheckMesh(const v1::ModelSpec& model, const Mesh& mesh) {
  std::vector<std::string> problems;
  if (const uint64_t layers = LayersOf(model); mesh.pipeline > layers) {
    problems.push_back(Refusal("parallel.pipeline", mesh.pipeline,
                               layers == 1
                                   ? std::string("the model has one layer, which is not shared between stages")
                                   : absl::StrCat("each stage needs at least one of the model's ", layers, " layers"),
                               static_cast<uint32_t>(layers)));
  }
  if (mesh.tensor > 1 && !model.has_gpt2()) {
    problems.push_back(Refusal("parallel.tensor", mesh.tensor, "only gpt2 models are cut within a layer", 1));
  } else if (mesh.tensor > 1) {
    const uint32_t heads = model.gpt2().heads(), vocabulary = model.gpt2().vocabulary();
    const uint32_t most = std::min(heads, vocabulary);
    const auto allowed = [heads](uint32_t value) { return heads % value == 0; };
    if (mesh.tensor > most || !allowed(mesh.tensor)) {
      problems.push_back(Refusal(
          "parallel.tensor", mesh.tensor,
          absl::StrCat("it must divide the model's ", heads, " attention heads (model.gpt2.heads)",
                       vocabulary < heads ? absl::StrCat(" and be at most model.gpt2.vocabulary, ", vocabulary) : ""),
          Nearest(mesh.tensor, most, allowed)));
    }
  }
  if (mesh.sequence_parallel && mesh.tensor == 1) {
    uint32_t tensor = 2;
    const uint32_t most = model.has_gpt2() ? std::min(model.gpt2().heads(), model.gpt2().vocabulary()) : 1;
    while (tensor <= most && model.gpt2().heads() % tensor != 0) ++tensor;
    problems.push_back(absl::StrCat(
        "parallel.sequence_parallel: found true with parallel.tensor 1: there are no tensor ranks to share the "
        "positions; the nearest value allowed is false",
        tensor <= most ? absl::StrCat(", or true with parallel.tensor ", tensor) : std::string()));
  }
  return problems.empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));
}

std::vector<Range> DealLayers(const std::vector<uint64_t>& layer_costs, uint64_t first, uint64_t last,
                              uint32_t stages) {
  Costs costs{std::vector<uint64_t>(layer_costs.size() + 1, 0), first, last};
  std::partial_sum(layer_costs.begin(), layer_costs.end(), costs.before.begin() + 1);
  const size_t layers = layer_costs.size();
  // The bound: the smallest one under which stages that take as many layers as they can reach the end.
  uint64_t low = 0, bound = costs.Of(0, layers);
  while (low < bound) {
    const uint64_t middle = low + (bound - low) / 2;
    if (Fits(costs, stages, middle)) {
      bound = middle;
    } else {
      low = middle + 1;
    }
  }
  // best[s][l]: the smallest sum of squares of stages s.. over layers l..; split[s][l]: where stage s ends then.
  constexpr Wide kNone = std::numeric_limits<Wide>::max();
  std::vector<Wide> behind(layers + 1, kNone);
  behind[layers] = 0;
  std::vector<std::vector<size_t>> split(stages, std::vector<size_t>(layers + 1, 0));
  for (uint32_t stage = stages; stage-- > 0;) {
    std::vector<Wide> best(layers + 1, kNone);
    for (size_t begin = 0; begin < layers; ++begin) {
      for (size_t end = begin + 1; end <= layers; ++end) {
        const uint64_t cost = costs.Of(begin, end);
        if (cost > bound) {
          if (end < layers) break;  // with more layers it costs more (the last one brings the head)
          continue;
        }
        if (behind[end] == kNone) continue;
        const Wide sum = behind[end] + static_cast<Wide>(cost) * cost;
        if (sum < best[begin]) {  // of equals the one that ends first
          best[begin] = sum;
          split[stage][begin] = end;
        }
      }
    }
    behind = std::move(best);
  }
  std::vector<Range> dealt;
  for (size_t stage = 0, begin = 0; stage < stages; ++stage) {
    dealt.push_back({begin, split[stage][begin]});
    begin = dealt.back().end;
  }
  return dealt;
}

std::vector<Range> StageLayers(const v1::ModelSpec& model, uint32_t stages) {
  std::vector<uint64_t> costs;
  uint64_t last = 0;
  if (model.has_gpt2()) {
    // Of a position: products with weights [C, 3C], [C, C], [C, 4C], [4C, C]; q k^T and the weighted sum of v over half
    // of the context on average. The embedding is a copy.
    const uint64_t c = model.gpt2().width(), t = model.gpt2().context();
    costs.assign(model.gpt2().layers(), t * (24 * c * c + 2 * t * c));
    last = t * 2 * c * model.gpt2().vocabulary();
  } else if (model.has_mlp()) {
    uint64_t in = model.mlp().inputs();
    for (int i = 0; i <= model.mlp().hidden_size(); ++i) {
      const uint64_t out = i < model.mlp().hidden_size() ? model.mlp().hidden(i) : model.mlp().classes();
      costs.push_back(2 * in * out);
      in = out;
    }
  } else {
    costs.push_back(1);
  }
  // Sums below 2^60, whatever the sizes.
  const Wide all = std::accumulate(costs.begin(), costs.end(), static_cast<Wide>(last));
  for (Wide scale = all >> 59; scale > 0; scale >>= 1) {
    for (uint64_t& cost : costs) cost = std::max<uint64_t>(cost / 2, 1);
    last /= 2;
  }
  return DealLayers(costs, 0, last, stages);
}

std::vector<Segment> SegmentsOf(const v1::ModelSpec& model, const ParameterSpace& space, const Mesh& mesh) {
  std::vector<Segment> segments;
  int held_by = 0;  // tensor rank of the last segment, or -1
  ForEachPiece(model, space, mesh, [&](const Range& range, const Holders& holders, int tensor) {
    if (range.size() == 0) return;
    std::vector<uint32_t> contributors;
    const auto add = [&](uint32_t stage) {
      if (tensor >= 0) {
        contributors.push_back(stage * mesh.tensor + static_cast<uint32_t>(tensor));
      } else {
        // All tensor ranks hold it. They compute the same gradient, but for sequence parallelism.
        const uint32_t ranks = mesh.sequence_parallel ? mesh.tensor : 1;
        for (uint32_t t = 0; t < ranks; ++t) contributors.push_back(stage * mesh.tensor + t);
      }
    };
    add(holders.first);
    if (holders.last != holders.first) add(holders.last);
    if (!segments.empty() && segments.back().contributors == contributors && held_by == tensor) {
      segments.back().range.end = range.end;
    } else {
      segments.push_back({range, std::move(contributors)});
    }
    held_by = tensor;
  });
  return segments;
}

std::vector<Range> ViewOf(const v1::ModelSpec& model, const ParameterSpace& space, const Mesh& mesh, uint32_t stage,
                          uint32_t tensor) {
  std::vector<Range> view;
  ForEachPiece(model, space, mesh, [&](const Range& range, const Holders& holders, int piece) {
    if (range.size() == 0 || (holders.first != stage && holders.last != stage)) return;
    if (piece >= 0 && static_cast<uint32_t>(piece) != tensor) return;
    if (!view.empty() && view.back().end == range.begin) {
      view.back().end = range.end;
    } else {
      view.push_back(range);
    }
  });
  return view;
}

std::vector<uint64_t> ViewElements(const v1::ModelSpec& model, const ParameterSpace& space, const Mesh& mesh) {
  std::vector<uint64_t> elements(mesh.ranks_of_replica());
  ForEachPiece(model, space, mesh, [&](const Range& range, const Holders& holders, int piece) {
    const auto add = [&](uint32_t stage) {
      const uint32_t first = piece < 0 ? 0 : static_cast<uint32_t>(piece), end = piece < 0 ? mesh.tensor : first + 1;
      for (uint32_t t = first; t < end; ++t) elements[stage * mesh.tensor + t] += range.size();
    };
    add(holders.first);
    if (holders.last != holders.first) add(holders.last);
  });
  return elements;
}

}  // namespace sluice
