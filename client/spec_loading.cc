#include "client/spec_loading.h"

#include <yaml-cpp/yaml.h>

#include <cctype>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "client/default_token_spec.h"
#include "common/checkpoint.h"
#include "common/gpt2_folder.h"
#include "common/job_spec.h"
#include "common/model_layout.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "worker/data/dataset.h"
#include "worker/data/file_list.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

absl::StatusOr<std::string> ReadSpecFile(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error))
    return absl::InvalidArgumentError(absl::StrCat(path, ": is a folder, a spec file is expected"));
  std::ifstream in(path, std::ios::binary);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be read: ", strerror(errno)));
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// All paths of the data that are set.
std::vector<std::string*> DataPathsOf(v1::DataSpec* data) {
  std::vector<std::string*> paths;
  const auto add = [&paths](std::string* path) {
    if (!path->empty()) paths.push_back(path);
  };
  if (data->has_text()) {
    add(data->mutable_text()->mutable_path());
    add(data->mutable_text()->mutable_validation_path());
    if (data->text().tokenizer().has_gpt2_bpe()) {
      add(data->mutable_text()->mutable_tokenizer()->mutable_gpt2_bpe()->mutable_vocab());
      add(data->mutable_text()->mutable_tokenizer()->mutable_gpt2_bpe()->mutable_merges());
    }
  }
  if (data->has_tokens()) {
    add(data->mutable_tokens()->mutable_path());
    add(data->mutable_tokens()->mutable_validation_path());
  }
  if (data->has_rows()) {
    add(data->mutable_rows()->mutable_path());
    add(data->mutable_rows()->mutable_validation_path());
  }
  if (data->has_idx()) {
    add(data->mutable_idx()->mutable_images());
    add(data->mutable_idx()->mutable_labels());
    add(data->mutable_idx()->mutable_validation_images());
    add(data->mutable_idx()->mutable_validation_labels());
  }
  if (data->has_csv()) {
    add(data->mutable_csv()->mutable_path());
    add(data->mutable_csv()->mutable_validation_path());
  }
  return paths;
}

bool Exists(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

std::string Absolute(const fs::path& path) { return fs::absolute(path).lexically_normal().string(); }

void FillFromData(const Dataset& data, v1::JobSpec* spec) {
  v1::ModelSpec* model = spec->mutable_model();
  if (model->has_gpt2() && model->gpt2().vocabulary() == 0) model->mutable_gpt2()->set_vocabulary(data.vocabulary());
  if (model->has_mlp()) {
    if (model->mlp().inputs() == 0) model->mutable_mlp()->set_inputs(data.inputs());
    if (model->mlp().classes() == 0) model->mutable_mlp()->set_classes(data.classes());
  }
  if (model->has_softmax()) {
    if (model->softmax().inputs() == 0) model->mutable_softmax()->set_inputs(data.inputs());
    if (model->softmax().classes() == 0) model->mutable_softmax()->set_classes(data.classes());
  }
  if (model->has_logistic() && model->logistic().inputs() == 0) model->mutable_logistic()->set_inputs(data.inputs());
  if (data.table() != nullptr) *spec->mutable_data()->mutable_csv()->mutable_schema() = *data.table();
}

// The schema of the table that the checkpoint at `folder` was trained on, where it is one and can be read here.
absl::Status TakeSchemaOf(const std::string& folder, v1::JobSpec* spec) {
  if (folder.empty() || !spec->data().has_csv() || !Exists(fs::path(folder) / "manifest.json")) return absl::OkStatus();
  ASSIGN_OR_RETURN(const auto reader, CheckpointReader::Open(folder, /*verify=*/false));
  TakeTableSchema(reader->manifest().spec(), spec);
  return absl::OkStatus();
}

}  // namespace

std::string JobNameFrom(const std::string& text) {
  std::string name;
  for (unsigned char c : text) {
    const char lower = static_cast<char>(std::tolower(c));
    if (std::isalnum(c) && c < 0x80) {
      name.push_back(lower);
    } else if (!name.empty() && name.back() != '-') {
      name.push_back('-');
    }
  }
  name.resize(std::min<size_t>(name.size(), 40));
  while (!name.empty() && name.back() == '-') name.pop_back();
  return name.empty() ? "job" : name;
}

namespace {

absl::Status ApplySets(const SpecSource& source, v1::JobSpec* spec) {
  for (const std::string& set : source.sets) {
    const absl::Status status = SetSpecField(spec, set);
    if (!status.ok()) return absl::Status(status.code(), absl::StrCat("--set ", status.message()));
  }
  return absl::OkStatus();
}

// Everything but what init.path has to say.
absl::StatusOr<v1::JobSpec> ReadSpec(const SpecSource& source, DataPaths paths) {
  v1::JobSpec spec;
  if (source.base != nullptr) {
    spec = *source.base;
  } else if (!source.text.empty()) {
    ASSIGN_OR_RETURN(const TokenDefaults made, DefaultTextSpec(source.text));
    spec = made.spec;
  } else if (!source.tokens.empty()) {
    ASSIGN_OR_RETURN(const TokenDefaults made, DefaultTokenFileSpec(source.tokens));
    spec = made.spec;
  } else {
    ASSIGN_OR_RETURN(const SpecFormat format, SpecFormatOf(source.path));
    ASSIGN_OR_RETURN(const std::string text, ReadSpecFile(source.path));
    ASSIGN_OR_RETURN(spec, ParseJobSpec(text, format, source.path));
    if (paths == DataPaths::kOfFile) {
      const fs::path folder = fs::path(source.path).parent_path();
      std::vector<std::string*> relative = DataPathsOf(spec.mutable_data());
      if (!spec.init().path().empty()) relative.push_back(spec.mutable_init()->mutable_path());
      for (std::string* path : relative) {
        if (fs::path(*path).is_absolute() || (!DataPathExists(folder / *path) && DataPathExists(*path))) continue;
        *path = Absolute(folder / *path);
      }
    }
  }
  RETURN_IF_ERROR(ApplySets(source, &spec));
  if (!source.name.empty()) spec.set_name(source.name);
  if (source.init.has_value()) {
    spec.clear_init();
    if (!source.init->path().empty()) *spec.mutable_init() = *source.init;
  }
  return spec;
}

// Makes init.path absolute where it is here or must be, and the checkpoint where it names a folder of them. Whether
// there is a GPT-2 folder to look into.
absl::StatusOr<bool> ResolveInit(DataPaths paths, v1::JobSpec* spec) {
  if (spec->init().path().empty() || spec->init().resume()) return false;
  std::string* const path = spec->mutable_init()->mutable_path();
  if (!Exists(*path)) {
    if (paths == DataPaths::kOfCluster) return false;
    return absl::NotFoundError(absl::StrCat("init.path: ", *path, ": no such folder"));
  }
  *path = Absolute(*path);
  if (IsGpt2Folder(*path)) return true;
  auto checkpoint = CheckpointFolder(*path);
  if (!checkpoint.ok()) {
    return absl::Status(checkpoint.status().code(), absl::StrCat("init.path: no GPT-2 folder (no config.json), and ",
                                                                 checkpoint.status().message()));
  }
  *path = *std::move(checkpoint);
  return false;
}

// The model's sizes that the spec leaves out.
absl::Status FillFromInit(v1::JobSpec* spec) {
  if (spec->model().kind_case() != v1::ModelSpec::KIND_NOT_SET && !spec->model().has_gpt2()) {
    return absl::InvalidArgumentError(absl::StrCat("init.path: ", spec->init().path(),
                                                   " is a GPT-2 folder, but the model is of another kind (model.mlp)"));
  }
  ASSIGN_OR_RETURN(const v1::Gpt2Spec found, ReadGpt2Config(spec->init().path()));
  v1::Gpt2Spec* const model = spec->mutable_model()->mutable_gpt2();
  if (model->layers() == 0) model->set_layers(found.layers());
  if (model->heads() == 0) model->set_heads(found.heads());
  if (model->width() == 0) model->set_width(found.width());
  if (model->context() == 0) model->set_context(found.context());
  if (model->vocabulary() == 0) model->set_vocabulary(found.vocabulary());
  if (!model->has_layer_norm_epsilon()) model->set_layer_norm_epsilon(found.layer_norm_epsilon());
  return absl::OkStatus();
}

// Damage to an input file is the input's fault, not this program's.
absl::Status InitFault(const absl::Status& status) {
  if (!absl::IsDataLoss(status)) return Annotate(status, "init.path");
  return absl::InvalidArgumentError(absl::StrCat("init.path: ", status.message()));
}

// Defaults, what the data says, and whether it is all right.
absl::StatusOr<v1::JobSpec> CompleteSpec(v1::JobSpec spec, const SpecSource& source, DataPaths paths) {
  bool readable = true;
  for (std::string* path : DataPathsOf(spec.mutable_data())) {
    if (paths == DataPaths::kOfFile || DataPathExists(*path)) *path = Absolute(*path);
    readable = readable && (paths == DataPaths::kOfFile || DataPathExists(*path));
  }
  FillDefaults(&spec);
  RETURN_IF_ERROR(TakeSchemaOf(spec.init().path(), &spec));
  if (!readable || spec.data().source_case() == v1::DataSpec::SOURCE_NOT_SET ||
      spec.model().kind_case() == v1::ModelSpec::KIND_NOT_SET) {
    RETURN_IF_ERROR(ValidateJobSpec(spec));
    return spec;
  }
  auto data = OpenDataset(spec, "", source.data_cache);
  if (data.ok()) FillFromData(**data, &spec);
  // What is wrong with the spec itself comes first: the data's error may only follow from it.
  absl::Status valid = ValidateJobSpec(spec);
  const bool lacks_what_data_say = !data.ok() && ClassifierSizesOf(spec.model()).has_value();
  if (!valid.ok() && !lacks_what_data_say) return valid;
  if (!data.ok()) return data.status();
  RETURN_IF_ERROR(valid);
  return spec;
}

}  // namespace

absl::StatusOr<v1::JobSpec> LoadSpec(const SpecSource& source, DataPaths paths) {
  ASSIGN_OR_RETURN(v1::JobSpec spec, ReadSpec(source, paths));
  ASSIGN_OR_RETURN(const bool imports, ResolveInit(paths, &spec));
  if (imports) {
    if (!source.text.empty() || !source.tokens.empty()) {
      // The default model's sizes are nobody's wish; those of --set are.
      spec.mutable_model()->clear_gpt2();
      RETURN_IF_ERROR(ApplySets(source, &spec));
    }
    const absl::Status filled = FillFromInit(&spec);
    if (!filled.ok()) return InitFault(filled);
  }
  ASSIGN_OR_RETURN(spec, CompleteSpec(std::move(spec), source, paths));
  if (imports) {
    const absl::Status opened = Gpt2FolderReader::Open(spec.init().path(), spec.model().gpt2()).status();
    if (!opened.ok()) return InitFault(opened);
  }
  return spec;
}

absl::StatusOr<std::string> CheckpointFolder(const std::string& folder) {
  if (!Exists(folder)) return absl::NotFoundError(absl::StrCat(folder, ": no such folder"));
  if (Exists(fs::path(folder) / "manifest.json")) return Absolute(folder);
  // A folder of checkpoints, or a run folder with one such folder per job below checkpoints/.
  std::vector<fs::path> bases = {folder};
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(fs::path(folder) / "checkpoints", error))
    bases.push_back(entry.path());
  std::string newest;
  double created = -1;
  for (const fs::path& base : bases) {
    ASSIGN_OR_RETURN(const std::vector<v1::CheckpointManifest> list, ListCheckpoints(base.string()));
    if (list.empty() || list.back().created_unix_seconds() <= created) continue;
    created = list.back().created_unix_seconds();
    newest = Absolute(base / CheckpointFolderName(list.back().timeline(), list.back().version()));
  }
  if (newest.empty()) {
    return absl::NotFoundError(
        absl::StrCat(folder, ": no published checkpoint (a folder such as t1-v400 with a manifest.json) is in it"));
  }
  return newest;
}

absl::StatusOr<v1::JobSpec> SpecOfCheckpoint(const std::string& folder) {
  ASSIGN_OR_RETURN(const auto reader, CheckpointReader::Open(folder, /*verify=*/false));
  return ToGoOnWith(reader->manifest().spec());
}

v1::JobSpec ToGoOnWith(v1::JobSpec spec) {
  spec.clear_init();
  spec.mutable_checkpoint()->clear_directory();  // named after the job that made it
  return spec;
}

absl::StatusOr<SchedulerAddress> FindScheduler(const std::string& flag,
                                               const std::function<std::string(const std::string&)>& getenv) {
  SchedulerAddress found{flag, "--scheduler"};
  if (found.address.empty()) found = {getenv("SLUICE_SCHEDULER"), "SLUICE_SCHEDULER"};
  if (found.address.empty()) {
    std::string folder = getenv("XDG_CONFIG_HOME");
    if (folder.empty() && !getenv("HOME").empty()) folder = getenv("HOME") + "/.config";
    const std::string path = folder + "/sluice/config.yaml";
    if (!folder.empty() && Exists(path)) {
      try {
        const YAML::Node config = YAML::LoadFile(path);
        for (const auto& entry : config) {
          const std::string key = entry.first.as<std::string>();
          if (key != "scheduler") {
            return absl::InvalidArgumentError(absl::StrCat(path, ":", entry.first.Mark().line + 1, ":",
                                                           entry.first.Mark().column + 1, ": unknown setting '", key,
                                                           "'; known is: scheduler"));
          }
          found = {entry.second.as<std::string>(), path};
        }
      } catch (const YAML::Exception& e) {
        return absl::InvalidArgumentError(absl::StrCat(path, ":", e.mark.line + 1, ":", e.mark.column + 1, ": ", e.msg,
                                                       "; expected scheduler: HOST:PORT"));
      }
    }
  }
  if (found.address.empty()) found = {absl::StrCat("127.0.0.1:", kSchedulerPort), "the default"};
  auto parsed = ParseHostPort(found.address, kSchedulerPort);
  if (!parsed.ok()) return Annotate(parsed.status(), found.source);
  if (parsed->port == 0)
    return absl::InvalidArgumentError(absl::StrCat(found.source, ": ", found.address, ": port 0 names no scheduler"));
  found.address = parsed->ToString();
  return found;
}

}  // namespace sluice
