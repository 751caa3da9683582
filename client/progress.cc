#include "client/progress.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/rpc.h"
#include "common/model_layout.h"

namespace sluice {
namespace {

constexpr absl::Duration kPlainInterval = absl::Seconds(1);

}  // namespace

std::string ShortDuration(absl::Duration duration) {
  const int64_t s = std::max<int64_t>(0, absl::ToInt64Seconds(duration + absl::Milliseconds(500)));
  if (s >= 86400) return absl::StrFormat("%dd%02dh", s / 86400, s % 86400 / 3600);
  if (s >= 3600) return absl::StrFormat("%dh%02dm", s / 3600, s % 3600 / 60);
  if (s >= 60) return absl::StrFormat("%dm%02ds", s / 60, s % 60);
  return absl::StrFormat("%ds", s);
}

std::string ShortNumber(double value) {
  if (!std::isfinite(value)) return "?";
  if (value >= 999.5e6) return absl::StrFormat("%.1fG", value / 1e9);
  if (value >= 999.5e3) return absl::StrFormat("%.1fM", value / 1e6);
  if (value >= 999.5) return absl::StrFormat("%.1fk", value / 1e3);
  return absl::StrFormat("%.0f", value);
}

std::string UnitName(const v1::JobStatus& status) {
  return ClassifierSizesOf(status.spec().model()).has_value() ? "samples" : "tokens";
}

std::string RoundTimeText(const v1::JobStatus& status) { return RoundTimeText(status, status.round_time()); }

std::string RoundTimeText(const v1::JobStatus& status, const v1::RoundTime& time) {
  if (time.total() <= 0) return "";
  const bool async = status.spec().train().mode() == v1::TrainSpec::ASYNC;
  const auto share = [&time](double part) { return absl::StrFormat("%.0f%%", 100 * part / time.total()); };
  std::string text = time.total() < 0.01 ? absl::StrFormat("%.1f ms", 1e3 * time.total())
                     : time.total() < 10 ? absl::StrFormat("%.0f ms", 1e3 * time.total())
                                         : absl::StrFormat("%.1f s", time.total());
  absl::StrAppend(&text, ": compute ", share(time.compute()), ", exposed communication ", share(time.exposed()));
  if (!async)
    absl::StrAppend(&text, ", waiting for others ", share(time.others()), ", verdict ", share(time.verdict()));
  const v1::ParallelSpec& parallel = status.spec().parallel();
  if (parallel.pipeline() > 1) absl::StrAppend(&text, ", for other stages ", share(time.pipeline()));
  if (parallel.tensor() > 1) absl::StrAppend(&text, ", for tensor ranks ", share(time.tensor()));
  return text;
}

std::string ProgressText(const v1::JobStatus& status) {
  std::string text = absl::StrCat("round ", status.rounds_done(), "/", status.rounds());
  if (status.rounds() > 0) {
    absl::StrAppend(&text, "  ", std::min<uint64_t>(100, 100 * status.rounds_done() / status.rounds()), "%");
  }
  if (status.has_last_train()) {
    if (status.last_train().skipped()) {
      absl::StrAppend(&text, "  round skipped");
    } else {
      absl::StrAppendFormat(&text, "  loss %.4f", status.last_train().loss());
    }
    if (status.spec().train().mode() == v1::TrainSpec::ASYNC) {
      absl::StrAppendFormat(&text, "  staleness %.1f, at most %d", status.last_train().staleness_mean(),
                            status.last_train().staleness_max());
    }
  }
  if (status.has_last_evaluation()) {
    absl::StrAppendFormat(&text, "  validation loss %.4f", status.last_evaluation().loss());
    if (ClassifierSizesOf(status.spec().model()).has_value())
      absl::StrAppendFormat(&text, "  accuracy %.4f", status.last_evaluation().accuracy());
  }
  if (status.tokens_per_second() > 0) {
    absl::StrAppend(&text, "  ", ShortNumber(status.tokens_per_second()), " ", UnitName(status), "/s");
  }
  if (!HasEnded(status.state()) && status.eta_seconds() > 0) {
    absl::StrAppend(&text, "  ETA ", ShortDuration(absl::Seconds(status.eta_seconds())));
  }
  return text;
}

void ProgressPrinter::Events(const v1::JobStatus& status) {
  for (int i = seen_ ? last_.warnings_size() : 0; i < status.warnings_size(); ++i) {
    WriteLine(absl::StrCat("warning: ", status.warnings(i)));
  }
  if (seen_ && status.rewinds() > last_.rewinds()) {
    WriteLine(absl::StrCat("rewound to round ", status.rounds_done(), ": ",
                           status.message().empty() ? "a server was lost" : status.message()));
  }
  const bool changed = !seen_ || status.state() != last_.state();
  if (changed && status.state() == v1::RUNNING && seen_ && last_.state() == v1::RECOVERING) {
    WriteLine(
        absl::StrCat("recovered in generation ", status.generation(), "; goes on from round ", status.rounds_done()));
  } else if (changed && status.state() == v1::RUNNING) {
    WriteLine(status.rounds_done() > 0 ? absl::StrCat("running, at round ", status.rounds_done()) : "running");
  } else if (!HasEnded(status.state()) && status.state() != v1::RUNNING &&
             (changed || status.message() != last_.message())) {
    WriteLine(absl::StrCat(StateName(status.state()), status.message().empty() ? "" : ": ", status.message()));
  } else if (!changed && status.state() == v1::RUNNING && status.recoveries() > last_.recoveries()) {
    WriteLine(
        absl::StrCat("recovered in generation ", status.generation(), "; goes on from round ", status.rounds_done()));
  }
  if (status.has_exact_until_round() && !(seen_ && last_.has_exact_until_round())) {
    WriteLine(absl::StrCat("bits equal those of an undisturbed run up to round ", status.exact_until_round(),
                           "; sluice logs and status say why"));
  }
}

void ProgressPrinter::Update(const v1::JobStatus& status, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  Events(status);
  const bool rounds = status.has_last_train() || status.state() == v1::RUNNING;
  last_text_ = rounds ? ProgressText(status) : "";
  if (!last_text_.empty() && last_text_ != shown_text_ && (terminal_ || now - shown_at_ >= kPlainInterval)) {
    shown_at_ = now;
    Draw(last_text_);
  }
  last_ = status;
  seen_ = true;
}

void ProgressPrinter::Draw(const std::string& text) {
  shown_text_ = text;
  if (!terminal_) {
    out_ << text << "\n" << std::flush;
    return;
  }
  std::string cut = text;
  if (columns_ > 1 && cut.size() >= static_cast<size_t>(columns_)) cut.resize(columns_ - 1);
  out_ << "\r" << cut << "\x1b[K" << std::flush;  // erases what a longer line left
  drawn_ = true;
}

void ProgressPrinter::Line(const std::string& text) {
  absl::MutexLock lock(&mutex_);
  WriteLine(text);
}

void ProgressPrinter::WriteLine(const std::string& text) {
  if (drawn_) out_ << "\r\x1b[K";
  drawn_ = false;
  out_ << text << "\n" << std::flush;
  if (terminal_ && !shown_text_.empty()) Draw(shown_text_);
}

void ProgressPrinter::Finish() {
  absl::MutexLock lock(&mutex_);
  if (!last_text_.empty() && last_text_ != shown_text_) Draw(last_text_);
  if (drawn_) out_ << "\n" << std::flush;
  drawn_ = false;
}

}  // namespace sluice
