#include "server/round_times.h"

#include <algorithm>
#include <cmath>

namespace sluice {

double SaneSeconds(double seconds) { return std::isfinite(seconds) ? std::clamp(seconds, 0.0, 1e9) : 0; }

void RoundTimes::Reported(uint64_t round, uint32_t contributor, absl::Time now) {
  reported_[round].emplace(contributor, now);
}

void RoundTimes::Fill(uint64_t round, const std::map<uint32_t, v1::RoundReport>& reports, bool verdict,
                      v1::RoundRecord* record) {
  std::map<uint32_t, absl::Time> before;
  if (auto it = reported_.find(round - 1); round > 0 && it != reported_.end()) before = it->second;
  reported_.erase(reported_.begin(), reported_.lower_bound(round));
  absl::Time last = absl::InfinitePast();
  for (const auto& [contributor, at] : before) last = std::max(last, at);
  for (const auto& [contributor, report] : reports) {
    const double wait = SaneSeconds(report.wait_seconds());
    // Done so much before the last one, it would have waited so long however fast everything else is.
    double others = 0;
    if (auto it = before.find(contributor); it != before.end()) {
      others = std::min(wait, absl::ToDoubleSeconds(last - it->second));
    }
    const double answer = verdict ? std::clamp(SaneSeconds(report.answer_seconds()) - others, 0.0, wait - others) : 0;
    v1::RankTime* time = record->add_times();
    time->set_contributor(contributor);
    time->set_compute(static_cast<float>(SaneSeconds(report.compute_seconds())));
    time->set_exposed(static_cast<float>(wait - others - answer));
    time->set_others(static_cast<float>(others));
    time->set_verdict(static_cast<float>(answer));
    time->set_pipeline(static_cast<float>(SaneSeconds(report.pipeline_seconds())));
    time->set_tensor(static_cast<float>(SaneSeconds(report.tensor_seconds())));
  }
}

}  // namespace sluice
