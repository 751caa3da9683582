// local: a whole cluster on this machine for one job.
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/commands.h"
#include "client/default_specs.h"
#include "client/default_token_spec.h"
#include "client/local_cluster.h"
#include "client/model_files.h"
#include "client/spec_loading.h"
#include "common/checkpoint.h"
#include "common/job_spec.h"
#include "common/mesh.h"
#include "common/mesh_rules.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

// Everything about one `sluice local`.
class LocalRun {
 public:
  LocalRun(const Args& args, const std::vector<std::string>& words, const ClientEnvironment& environment)
      : args_(args),
        words_(words),
        environment_(environment),
        printer_(environment.out, environment.out_is_terminal, environment.columns) {}

  int Run();

 private:
  absl::Status Prepare();
  absl::Status DescribeChoice(const SpecSource& source);
  // The data that flags name without a spec; SOURCE_NOT_SET where they name none.
  absl::StatusOr<v1::DataSpec> DataOfFlags() const;
  absl::Status MakeRunFolder();
  absl::Status StartJob();
  int Train();
  int Finish(const v1::JobStatus& status);
  int Interrupted();
  absl::Status PrintSample(const std::string& folder);
  std::string ResumeLine(const std::string& checkpoint) const;
  bool AllRoundsIn(const std::string& checkpoint) const;
  std::string Shown(const std::string& path) const;
  fs::path Runs() const { return fs::absolute(args_.String("runs", "sluice-runs")).lexically_normal(); }
  // Shared by all runs: tokenizing a text once will do.
  std::string DataCache() const { return (Runs() / "cache").string(); }

  const Args& args_;
  const std::vector<std::string>& words_;
  const ClientEnvironment& environment_;
  ProgressPrinter printer_;
  v1::JobSpec spec_;
  std::string chosen_;  // the spec made from the data alone, to be shown
  int workers_ = 1, servers_ = 1, threads_ = 1;
  std::string run_folder_, job_;
  std::unique_ptr<LocalCluster> cluster_;
  std::unique_ptr<SchedulerClient> client_;
  v1::JobStatus last_;
};

// What was chosen for data without a spec, as a spec to keep.
absl::Status LocalRun::DescribeChoice(const SpecSource& source) {
  if (source.text.empty() && source.tokens.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(TokenDefaults made,
                   source.tokens.empty() ? DefaultTextSpec(source.text) : DefaultTokenFileSpec(source.tokens));
  for (const std::string& set : source.sets) {
    const absl::Status status = SetSpecField(&made.spec, set);
    if (!status.ok()) return absl::Status(status.code(), absl::StrCat("--set ", status.message()));
  }
  if (made.spec.model().has_gpt2() && made.spec.model().gpt2().vocabulary() == 0 && made.spec.data().has_text() &&
      !made.spec.data().text().has_tokenizer()) {
    made.spec.mutable_model()->mutable_gpt2()->set_vocabulary(256);  // bytes; a file to keep should say so
  }
  chosen_ =
      absl::StrCat("no spec was given; this one was made for ", made.description, ":\n\n", JobSpecToYaml(made.spec));
  return absl::OkStatus();
}

absl::StatusOr<v1::DataSpec> LocalRun::DataOfFlags() const {
  v1::DataSpec data;
  const bool images = args_.Has("images"), csv = args_.Has("csv");
  for (const char* flag : {"labels", "validation_images", "validation_labels"}) {
    if (args_.Has(flag) && !images) return absl::InvalidArgumentError(absl::StrCat("--", flag, " needs --images"));
  }
  for (const char* flag : {"label", "validation_csv"}) {
    if (args_.Has(flag) && !csv) return absl::InvalidArgumentError(absl::StrCat("--", flag, " needs --csv"));
  }
  if (images) {
    if (!args_.Has("labels")) return absl::InvalidArgumentError("--images needs --labels, the images' classes");
    v1::IdxSource* idx = data.mutable_idx();
    idx->set_images(args_.String("images"));
    idx->set_labels(args_.String("labels"));
    idx->set_validation_images(args_.String("validation_images"));
    idx->set_validation_labels(args_.String("validation_labels"));
  }
  if (csv) {
    if (!args_.Has("label")) {
      return absl::InvalidArgumentError(
          "--csv needs --label, the class's column: its name in the header, or its index from 0 (-1: the last)");
    }
    data.mutable_csv()->set_path(args_.String("csv"));
    data.mutable_csv()->set_label(args_.String("label"));
    data.mutable_csv()->set_validation_path(args_.String("validation_csv"));
  }
  return data;
}

absl::Status LocalRun::Prepare() {
  SpecSource source;
  source.path = args_.argument(0);
  source.text = args_.String("text");
  source.sets = args_.List("set");
  source.name = args_.String("name");
  source.data_cache = DataCache();
  source.tokens = args_.String("tokens");
  if (!source.path.empty() + !source.text.empty() + !source.tokens.empty() + args_.Has("images") + args_.Has("csv") >
      1) {
    return absl::InvalidArgumentError(
        "a spec, --text, --tokens, --images and --csv exclude each other: the data become the spec");
  }
  ASSIGN_OR_RETURN(const v1::DataSpec data, DataOfFlags());
  v1::JobSpec made;
  if (data.source_case() != v1::DataSpec::SOURCE_NOT_SET) {
    ASSIGN_OR_RETURN(const DefaultSpec of_data, DefaultClassifierSpec(data, source.sets));
    made = of_data.spec;
    source.base = &made;
    chosen_ = absl::StrCat("no spec was given; this one was made for ", of_data.description, ":\n\n", of_data.yaml);
  }
  RETURN_IF_ERROR(DescribeChoice(source));
  std::string resume;
  v1::JobSpec resumed;
  if (args_.Has("resume")) {
    if (args_.Has("init")) {
      return absl::InvalidArgumentError("--resume and --init exclude each other: a resume has its parameters already");
    }
    ASSIGN_OR_RETURN(resume, CheckpointFolder(args_.String("resume")));
    source.init.emplace().set_path(resume);
    source.init->set_resume(true);
    if (source.path.empty() && source.text.empty() && source.tokens.empty() && source.base == nullptr) {
      ASSIGN_OR_RETURN(resumed, SpecOfCheckpoint(resume));
      source.base = &resumed;
    }
  }
  if (args_.Has("init")) source.init.emplace().set_path(args_.String("init"));
  if (source.path.empty() && source.text.empty() && source.tokens.empty() && source.base == nullptr) {
    return absl::InvalidArgumentError(
        "a spec is expected: sluice local SPEC; or data alone: sluice local --text FILE, --tokens FILE, --images FILE "
        "--labels FILE, --csv FILE --label COLUMN");
  }
  if (args_.Has("workers")) {
    // As many replicas as there are workers for, unless the spec says otherwise; --set comes after and wins.
    const auto asked = LoadSpec(source, DataPaths::kOfFile);
    if (asked.ok() && asked->parallel().data() <= 1) {
      const int64_t replicas = args_.Integer("workers", 1) / MeshOf(asked->parallel()).ranks_of_replica();
      source.sets.insert(source.sets.begin(), absl::StrCat("parallel.data=", std::max<int64_t>(1, replicas)));
    }
  }
  ASSIGN_OR_RETURN(spec_, LoadSpec(source, DataPaths::kOfFile));
  if (!chosen_.empty() && args_.Has("init")) {
    chosen_ = absl::StrCat("no spec was given; this one was made for the data and --init:\n\n", JobSpecToYaml(spec_));
  }
  const Mesh mesh = MeshOf(spec_.parallel());
  const int ranks = static_cast<int>(mesh.ranks());
  workers_ = static_cast<int>(args_.Integer("workers", ranks));
  servers_ = static_cast<int>(args_.Integer("servers", 1));
  if (workers_ < ranks) {
    return absl::InvalidArgumentError(absl::StrCat(TooFewWorkers(spec_.model(), mesh, static_cast<uint64_t>(workers_)),
                                                   ", or raise --workers to ", ranks));
  }
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  threads_ = static_cast<int>(args_.Integer("threads", std::max(1, cores / ranks)));
  return absl::OkStatus();
}

absl::Status LocalRun::MakeRunFolder() {
  const fs::path runs = Runs();
  std::error_code error;
  fs::create_directories(runs, error);
  if (error) return absl::FailedPreconditionError(absl::StrCat(runs.string(), ": cannot be made: ", error.message()));
  for (int i = 1;; ++i) {
    const fs::path folder = runs / absl::StrCat(spec_.name(), "-", i);
    if (fs::create_directory(folder, error)) {
      run_folder_ = folder.string();
      break;
    }
    if (error)
      return absl::FailedPreconditionError(absl::StrCat(folder.string(), ": cannot be made: ", error.message()));
  }
  // Without what the data decide: somebody may run it again with other data.
  v1::JobSpec kept = spec_;
  if (kept.data().has_csv()) kept.mutable_data()->mutable_csv()->clear_schema();
  std::ofstream(fs::path(run_folder_) / "spec.yaml") << JobSpecToYaml(kept);
  if (!chosen_.empty()) {
    *environment_.out << chosen_ << "\nwith every default it is kept as " << Shown(run_folder_) << "/spec.yaml"
                      << std::endl;
  }
  return absl::OkStatus();
}

// Relative to the working folder where that is shorter.
std::string LocalRun::Shown(const std::string& path) const {
  const std::string relative = fs::path(path).lexically_proximate(fs::current_path()).string();
  return relative.size() < path.size() ? relative : path;
}

absl::Status LocalRun::StartJob() {
  LocalCluster::Options options;
  options.binaries = environment_.program_folder;
  options.run_folder = run_folder_;
  options.servers = servers_;
  options.workers = workers_;
  options.threads = threads_;
  options.device = args_.String("device", "cpu");
  options.data_cache = DataCache();
  options.notice = [this](const std::string& text) { printer_.Line(text); };
  options.failed = [this] { environment_.interrupt->Notify(); };
  ASSIGN_OR_RETURN(cluster_, LocalCluster::Start(std::move(options), environment_.interrupt));
  printer_.Line(absl::StrCat("started a scheduler, ", servers_, servers_ == 1 ? " server" : " servers", " and ",
                             workers_, workers_ == 1 ? " worker" : " workers", "; run folder ", Shown(run_folder_)));
  SchedulerClient::Options client;
  client.address = cluster_->scheduler_address();
  client.address_source = "the local cluster";
  client.interrupt = environment_.interrupt;
  client.notice = [this](const std::string& text) { printer_.Line(text); };
  client_ = std::make_unique<SchedulerClient>(std::move(client));
  v1::SubmitJobRequest request;
  *request.mutable_spec() = spec_;
  request.set_request_id(run_folder_);
  ASSIGN_OR_RETURN(const v1::SubmitJobResponse response, client_->Submit(request));
  job_ = response.job_id();
  return absl::OkStatus();
}

int LocalRun::Train() {
  const auto status = client_->Watch(job_, [this](const v1::JobStatus& update) {
    last_ = update;
    printer_.Update(update, absl::Now());
  });
  printer_.Finish();
  if (status.ok()) return Finish(*status);
  if (environment_.interrupt->count() > 0) return Interrupted();
  return Report(status.status(), environment_);
}

int LocalRun::Finish(const v1::JobStatus& status) {
  // The whole status, while there is still a scheduler to ask; the watched one will do otherwise.
  v1::JobStatus end = status;
  if (auto asked = client_->GetJob(job_); asked.ok()) end = *std::move(asked);
  cluster_->Stop();
  const int code = PrintEnd(end, environment_);
  std::ostream& out = *environment_.out;
  if (code != kExitOk) {
    *environment_.err << "sluice: logs are in " << Shown(run_folder_) << "/logs" << std::endl;
    return code;
  }
  if (!end.has_last_checkpoint()) return kExitOk;
  const std::string& checkpoint = end.last_checkpoint().directory();
  out << "checkpoint " << Shown(checkpoint) << std::endl;
  const bool gpt2 = spec_.model().has_gpt2();
  if (!args_.Bool("no_export")) {
    const std::string target = run_folder_ + "/export";
    const absl::Status exported = ExportModel(checkpoint, target);
    if (!exported.ok()) return Report(exported, environment_);
    out << "exported " << Shown(target) << (gpt2 ? " (Hugging Face GPT-2: " : " (PyTorch's names: ")
        << "config.json, model.safetensors)" << std::endl;
  }
  if (!gpt2) return kExitOk;
  const absl::Status sampled = PrintSample(checkpoint);
  return sampled.ok() ? kExitOk : Report(sampled, environment_);
}

absl::Status LocalRun::PrintSample(const std::string& folder) {
  SampleOptions options;
  options.tokens = args_.Integer("sample_bytes", 300);
  if (options.tokens == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const auto model, LoadedModel::Load(folder, 1));
  const auto bpe = model->tokenizer().bpe;
  if (bpe == nullptr) return absl::OkStatus();
  std::string text;
  TokenText printed(bpe, environment_.out_is_terminal);
  RETURN_IF_ERROR(Sample(model.get(), bpe->Encode("\n"), options, [&](int32_t token) {
    text += printed.Push(token);
    return environment_.interrupt->count() == 0;
  }));
  *environment_.out << "sample of " << text.size() << " bytes:\n" << text << std::endl;
  return absl::OkStatus();
}

// The command line again, going on from the checkpoint; from the beginning where there is none.
std::string LocalRun::ResumeLine(const std::string& checkpoint) const {
  std::vector<std::string> line = {ShellQuote(environment_.program)};
  for (size_t i = 0; i < words_.size(); ++i) {
    const bool from = words_[i].rfind("--resume", 0) == 0 || words_[i].rfind("--init", 0) == 0;
    if (!checkpoint.empty() && from) {
      if (words_[i].find('=') == std::string::npos) ++i;
      continue;
    }
    line.push_back(ShellQuote(words_[i]));
  }
  if (!checkpoint.empty()) line.push_back("--resume " + ShellQuote(Shown(checkpoint)));
  return absl::StrJoin(line, " ");
}

bool LocalRun::AllRoundsIn(const std::string& checkpoint) const {
  const auto reader = CheckpointReader::Open(checkpoint, /*verify=*/false);
  return reader.ok() && (*reader)->manifest().version() >= spec_.train().rounds();
}

int LocalRun::Interrupted() {
  if (const absl::Status status = cluster_->status(); !status.ok()) {
    *environment_.err << "sluice: " << status.message() << std::endl;
    return kExitJobFailed;
  }
  std::ostream& err = *environment_.err;
  const int seen = environment_.interrupt->count();
  const bool trained = last_.rounds_done() > 0;
  if (trained && seen == 1) {
    err << "sluice: interrupted at round " << last_.rounds_done() << "; making a checkpoint (Ctrl-C again: without it)"
        << std::endl;
    client_->set_seen_interrupts(seen);
    if (auto cancelled = client_->Cancel(job_, /*checkpoint_first=*/true); cancelled.ok()) {
      last_ = *std::move(cancelled);
    } else if (environment_.interrupt->count() == seen) {
      err << "sluice: no new checkpoint: " << cancelled.status().message() << std::endl;
    }
  }
  cluster_->Stop();
  // On disk is what counts, whatever the scheduler still had to say.
  const auto newest = CheckpointFolder(run_folder_);
  std::string checkpoint = newest.ok() ? *newest : "";
  if (checkpoint.empty() && spec_.init().resume()) checkpoint = spec_.init().path();
  if (AllRoundsIn(checkpoint)) {
    err << "sluice: every process has ended. All " << spec_.train().rounds() << " rounds were done: nothing to resume."
        << std::endl;
    if (!args_.Bool("no_export")) {
      err << "To export the model:\n    " << ShellQuote(environment_.program) << " export "
          << ShellQuote(Shown(checkpoint)) << " FOLDER" << std::endl;
    }
    *environment_.out << "checkpoint " << Shown(checkpoint) << std::endl;
    return kExitInterrupted;
  }
  err << "sluice: every process has ended. "
      << (checkpoint.empty() ? "No checkpoint was published yet; to start again:" : "To resume:") << "\n    "
      << ResumeLine(checkpoint) << std::endl;
  return kExitInterrupted;
}

int LocalRun::Run() {
  absl::Status status = Prepare();
  if (status.ok()) status = MakeRunFolder();
  if (!status.ok()) return Report(status, environment_);
  status = StartJob();
  if (status.ok()) return Train();
  // Spec errors that only the scheduler sees, a cluster that did not start, Ctrl-C.
  if (cluster_ != nullptr && !cluster_->status().ok()) status = cluster_->status();
  if (cluster_ != nullptr) cluster_->Stop();
  if (absl::IsCancelled(status) && environment_.interrupt->count() > 0) {
    *environment_.err << "sluice: interrupted; every process has ended. To start again:\n    " << ResumeLine("")
                      << std::endl;
    return kExitInterrupted;
  }
  const int code = Report(status, environment_);
  // Only the network could make a scheduler of ours unreachable: that is a fault, not a matter of addresses.
  return code == kExitUnreachable ? static_cast<int>(kExitJobFailed) : code;
}

}  // namespace

int RunLocal(const Args& args, const std::vector<std::string>& words, const ClientEnvironment& environment) {
  return LocalRun(args, words, environment).Run();
}

}  // namespace sluice
