// ValidateJobSpec: every rule of job.proto, and sizes whose products would overflow.
#include <cmath>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/job_spec.h"
#include "common/layout.h"
#include "common/mesh_rules.h"
#include "common/model_layout.h"
#include "common/wire_format.h"

namespace sluice {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr size_t kMaxText = 4096;
constexpr uint64_t kMaxParameters = uint64_t{1} << 42;
constexpr uint64_t kMaxChunks = uint64_t{1} << 24;
constexpr uint64_t kMaxPositions = uint64_t{1} << 62;    // of a job
constexpr uint64_t kMaxActivations = uint64_t{1} << 44;  // elements of one tensor of activations

class Checker {
 public:
  explicit Checker(const v1::JobSpec& spec) : spec_(spec) {}

  absl::Status Check() {
    Unknown(spec_, "");
    Name();
    const size_t before = problems_.size();
    Model();
    const bool sound_model = problems_.size() == before;
    Data();
    Train();
    Optimizer();
    Parallel(sound_model);
    Transfer();
    Rest();
    if (problems_.empty()) Products();
    if (problems_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrJoin(problems_, "\n"));
  }

 private:
  template <typename... Args>
  void Problem(const Args&... args) {
    problems_.push_back(absl::StrCat(args...));
  }

  void Whole(const std::string& path, uint64_t found, uint64_t least, uint64_t most) {
    if (found < least || found > most) Problem(path, ": found ", found, ", allowed ", least, " to ", most);
  }

  // A size that data decides where the user does not.
  void FromData(const std::string& path, uint64_t found, uint64_t least, uint64_t most) {
    if (found == 0) return Problem(path, " is 0: set it, or let the client read the data");
    Whole(path, found, least, most);
  }

  // The kernels compute in float32: a value has to satisfy the rule there too.
  void Positive(const std::string& path, double found) {
    const float narrow = static_cast<float>(found);
    if (!std::isfinite(narrow) || !(narrow > 0)) {
      Problem(path, ": found ", found, ", allowed numbers greater than 0 within the range of float32");
    }
  }
  void NotNegative(const std::string& path, double found) {
    if (!std::isfinite(static_cast<float>(found)) || !(found >= 0)) {
      Problem(path, ": found ", found, ", allowed 0 and greater numbers within the range of float32");
    }
  }
  void BelowOne(const std::string& path, double found) {
    if (!(found >= 0) || !(static_cast<float>(found) < 1)) {
      Problem(path, ": found ", found, ", allowed 0 to less than 1 (in float32)");
    }
  }

  void Later(const std::string& path, uint64_t found, uint64_t allowed) {
    if (found == allowed) return;
    if (found < allowed) return Problem(path, ": found ", found, ", allowed ", allowed);
    Problem(path, ": ", found, " is not supported by this version yet; set it to ", allowed, " or leave it out");
  }

  void Text(const std::string& path, const std::string& found) {
    if (found.size() > kMaxText) {
      Problem(path, ": found ", found.size(), " bytes, allowed at most ", kMaxText);
    } else if (found.find('\0') != std::string::npos) {
      Problem(path, ": found \"", absl::Utf8SafeCEscape(found), "\", allowed is text without zero bytes");
    }
  }

  void File(const std::string& path, const std::string& found) {
    if (found.empty()) return Problem(path, ": found nothing, expected the path of a file");
    Text(path, found);
  }

  // Fields of a later version, in a message that came over the wire: nothing is left out silently.
  void Unknown(const Message& message, const std::string& path) {
    const auto* reflection = message.GetReflection();
    const auto& unknown = reflection->GetUnknownFields(message);
    for (int i = 0; i < unknown.field_count(); ++i) {
      Problem(path.empty() ? "the spec" : path, ": field number ", unknown.field(i).number(),
              " is not known to this version; use a client of the scheduler's version");
    }
    std::vector<const FieldDescriptor*> fields;
    reflection->ListFields(message, &fields);
    for (const FieldDescriptor* field : fields) {
      if (field->message_type() == nullptr || field->is_repeated()) continue;
      Unknown(reflection->GetMessage(message, field),
              path.empty() ? field->name() : absl::StrCat(path, ".", field->name()));
    }
  }

  void Name() {
    const std::string& name = spec_.name();
    const bool letters = name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") == std::string::npos;
    if (name.empty() || name.size() > 40 || !letters) {
      Problem("name: found \"", absl::Utf8SafeCEscape(name.substr(0, 80)),
              "\", allowed are 1 to 40 lower-case letters, digits and '-'");
    }
  }

  void Model() {
    switch (spec_.model().kind_case()) {
      case v1::ModelSpec::kGpt2: {
        const v1::Gpt2Spec& gpt2 = spec_.model().gpt2();
        Whole("model.gpt2.layers", gpt2.layers(), 1, 1024);
        Whole("model.gpt2.width", gpt2.width(), 1, 65536);
        if (gpt2.heads() == 0) {
          Problem("model.gpt2.heads: found 0, allowed are divisors of the width, ", gpt2.width());
        } else if (gpt2.width() % gpt2.heads() != 0) {
          Problem("model.gpt2.heads: found ", gpt2.heads(), ", which does not divide model.gpt2.width, ", gpt2.width(),
                  "; allowed are divisors of the width");
        }
        Whole("model.gpt2.context", gpt2.context(), 1, 1048576);
        FromData("model.gpt2.vocabulary", gpt2.vocabulary(), 2, uint64_t{1} << 24);
        Positive("model.gpt2.layer_norm_epsilon", gpt2.layer_norm_epsilon());
        BelowOne("model.gpt2.dropout", gpt2.dropout());
        break;
      }
      case v1::ModelSpec::kMlp: {
        const v1::MlpSpec& mlp = spec_.model().mlp();
        FromData("model.mlp.inputs", mlp.inputs(), 1, uint64_t{1} << 32);
        if (mlp.hidden_size() > 1023)
          Problem("model.mlp.hidden: found ", mlp.hidden_size(), " layers, allowed 0 to 1023");
        for (int i = 0; i < mlp.hidden_size() && i < 1023; ++i) {
          Whole(absl::StrCat("model.mlp.hidden[", i, "]"), mlp.hidden(i), 1, uint64_t{1} << 32);
        }
        FromData("model.mlp.classes", mlp.classes(), 2, uint64_t{1} << 20);
        break;
      }
      case v1::ModelSpec::kSoftmax:
        FromData("model.softmax.inputs", spec_.model().softmax().inputs(), 1, uint64_t{1} << 32);
        FromData("model.softmax.classes", spec_.model().softmax().classes(), 2, uint64_t{1} << 20);
        break;
      case v1::ModelSpec::kLogistic:
        FromData("model.logistic.inputs", spec_.model().logistic().inputs(), 1, uint64_t{1} << 32);
        break;
      case v1::ModelSpec::KIND_NOT_SET:
        Problem("model: found no model, expected one of gpt2, mlp, softmax, logistic");
        break;
    }
  }

  void Data() {
    const v1::DataSpec& data = spec_.data();
    std::string source;
    bool dense = false;  // samples of features and a class, not tokens
    switch (data.source_case()) {
      case v1::DataSpec::kText:
        source = "text";
        TextFiles(data.text());
        break;
      case v1::DataSpec::kTokens:
        source = "tokens";
        File("data.tokens.path", data.tokens().path());
        Text("data.tokens.validation_path", data.tokens().validation_path());
        break;
      case v1::DataSpec::kRows:
        source = "rows";
        File("data.rows.path", data.rows().path());
        Text("data.rows.validation_path", data.rows().validation_path());
        break;
      case v1::DataSpec::kIdx: {
        source = "idx", dense = true;
        const v1::IdxSource& idx = data.idx();
        File("data.idx.images", idx.images());
        File("data.idx.labels", idx.labels());
        if (!idx.validation_images().empty() || !idx.validation_labels().empty()) {
          File("data.idx.validation_images", idx.validation_images());
          File("data.idx.validation_labels", idx.validation_labels());
        }
        break;
      }
      case v1::DataSpec::kCsv:
        source = "csv", dense = true;
        Csv(data.csv());
        break;
      case v1::DataSpec::SOURCE_NOT_SET:
        return Problem("data: found no source, expected one of text, tokens, rows, idx, csv");
    }
    const auto classifier = ClassifierSizesOf(spec_.model());
    if (spec_.model().has_gpt2() && dense) {
      Problem("data: found ", source,
              ", which feeds a model of features, beside model.gpt2; allowed with it are text, tokens, rows");
    } else if (classifier.has_value() && !dense) {
      Problem("data: found ", source, ", which feeds the model gpt2, beside model.", classifier->kind,
              "; allowed with it are idx, csv");
    }
    const double fraction = data.validation_fraction();
    if (!(fraction >= 0 && fraction <= 0.5)) {
      Problem("data.validation_fraction: found ", fraction, ", allowed 0 to 0.5");
    }
  }

  void TextFiles(const v1::TextSource& text) {
    File("data.text.path", text.path());
    Text("data.text.validation_path", text.validation_path());
    Text("data.text.separator", text.separator());
    if (text.has_tokenizer() && text.tokenizer().kind_case() == v1::TokenizerSpec::KIND_NOT_SET) {
      Problem("data.text.tokenizer: found no kind, expected gpt2_bpe (or leave the tokenizer out: bytes)");
    }
    if (text.tokenizer().has_gpt2_bpe()) {
      File("data.text.tokenizer.gpt2_bpe.vocab", text.tokenizer().gpt2_bpe().vocab());
      File("data.text.tokenizer.gpt2_bpe.merges", text.tokenizer().gpt2_bpe().merges());
    }
    if (!v1::TextSource::Documents_IsValid(text.documents())) {
      Problem("data.text.documents: found ", static_cast<int>(text.documents()), ", allowed whole_file, blank_line");
    }
    if (!v1::TextSource::InvalidUtf8_IsValid(text.invalid_utf8())) {
      Problem("data.text.invalid_utf8: found ", static_cast<int>(text.invalid_utf8()), ", allowed refuse, keep");
    }
  }

  void Csv(const v1::CsvSource& csv) {
    File("data.csv.path", csv.path());
    Text("data.csv.validation_path", csv.validation_path());
    if (csv.label().empty()) {
      Problem(
          "data.csv.label: found nothing, expected the name of the class's column or its index from 0 (-1: the last)");
    }
    Text("data.csv.label", csv.label());
    for (int i = 0; i < csv.ignore_size(); ++i) Text(absl::StrCat("data.csv.ignore[", i, "]"), csv.ignore(i));
    if (!CsvDelimiter(csv.delimiter()).has_value()) {
      Problem("data.csv.delimiter: found \"", absl::Utf8SafeCEscape(csv.delimiter().substr(0, 20)),
              "\", allowed is one of , ; | : or a space, or \"tab\"");
    }
    if (csv.header() < v1::CsvSource::AUTO || csv.header() > v1::CsvSource::NO) {
      Problem("data.csv.header: found ", static_cast<int>(csv.header()), ", allowed auto, yes, no");
    }
    Schema(csv);
  }

  void Schema(const v1::CsvSource& csv) {
    const v1::TableSchema& schema = csv.schema();
    if (!csv.has_schema()) {
      return Problem(
          "data.csv.schema: found none; the client fills it in where it can read the file: submit from such a machine, "
          "or "
          "submit what `sluice validate --print` prints there");
    }
    const int features = schema.features_size();
    if (const auto sizes = ClassifierSizesOf(spec_.model()); sizes.has_value()) {
      if (sizes->inputs != 0 && static_cast<uint64_t>(features) != sizes->inputs) {
        Problem("data.csv.schema.features: found ", features, " columns, beside model.", sizes->kind, ".inputs ",
                sizes->inputs);
      }
      if (sizes->classes != 0 && static_cast<uint64_t>(schema.labels_size()) > sizes->classes) {
        Problem("data.csv.schema.labels: found ", schema.labels_size(), " classes, beside model.", sizes->kind,
                sizes->kind == "logistic" ? ", which tells 2 apart (model.softmax takes more)"
                                          : absl::StrCat(".classes ", sizes->classes));
      }
    }
    const int numbers = csv.standardize() ? features : 0;
    if (schema.mean_size() != numbers || schema.deviation_size() != numbers) {
      return Problem("data.csv.schema: found ", schema.mean_size(), " means and ", schema.deviation_size(),
                     " deviations, expected ", numbers, " each");
    }
    for (int i = 0; i < numbers; ++i) {
      if (!std::isfinite(schema.mean(i)) || !std::isfinite(schema.deviation(i)) || !(schema.deviation(i) > 0)) {
        return Problem("data.csv.schema: mean ", schema.mean(i), ", deviation ", schema.deviation(i), " of feature ", i,
                       ": expected finite numbers, a deviation greater than 0");
      }
    }
    absl::flat_hash_set<std::string> labels;
    for (const std::string& label : schema.labels()) {
      if (!labels.insert(label).second) {
        return Problem("data.csv.schema.labels: found \"", absl::Utf8SafeCEscape(label), "\" twice");
      }
    }
  }

  void Train() {
    const v1::TrainSpec& train = spec_.train();
    Whole("train.rounds", train.rounds(), 1, uint64_t{1} << 40);
    Whole("train.batch", train.batch(), 1, uint64_t{1} << 24);
    if (train.recompute() && !spec_.model().has_gpt2()) {
      Problem("train.recompute: found true; only gpt2 models have layers that keep enough to gain by it; leave it out");
    }
    const bool async = train.mode() == v1::TrainSpec::ASYNC;
    if (async) {
      Async();
    } else if (train.mode() != v1::TrainSpec::SYNC) {
      Problem("train.mode: ",
              v1::TrainSpec::Mode_IsValid(train.mode()) ? v1::TrainSpec::Mode_Name(train.mode())
                                                        : absl::StrCat(static_cast<int>(train.mode())),
              " is not supported by this version yet; set it to sync or async, or leave it out");
    }
    if (!async && train.staleness_scale() != v1::TrainSpec::STALENESS_SCALE_UNSPECIFIED) {
      Problem("train.staleness_scale: found ", v1::TrainSpec::StalenessScale_Name(train.staleness_scale()),
              ", which only train.mode async has; leave it out");
    }
    if (train.nonfinite() != v1::TrainSpec::SKIP_ROUND && train.nonfinite() != v1::TrainSpec::SKIP_CHUNK) {
      Problem("train.nonfinite: found ", static_cast<int>(train.nonfinite()), ", allowed skip_round, skip_chunk");
    }
    Whole("train.max_skipped_rounds", train.max_skipped_rounds(), 1, std::numeric_limits<uint32_t>::max());
    Later("train.drop_slowest", train.drop_slowest(), 0);
  }

  // A contribution is applied alone: nothing is decided for all of a round.
  void Async() {
    const v1::TrainSpec& train = spec_.train();
    if (train.nonfinite() == v1::TrainSpec::SKIP_ROUND) {
      Problem(
          "train.nonfinite: found skip_round, which train.mode async does not have; set it to skip_chunk or leave "
          "it out");
    }
    if (train.staleness_scale() != v1::TrainSpec::NONE && train.staleness_scale() != v1::TrainSpec::INVERSE) {
      Problem("train.staleness_scale: found ", static_cast<int>(train.staleness_scale()), ", allowed none, inverse");
    }
    for (const auto& [path, degree] : {std::pair{"parallel.tensor", spec_.parallel().tensor()},
                                       std::pair{"parallel.pipeline", spec_.parallel().pipeline()}}) {
      if (degree > 1) {
        Problem(path, ": found ", degree,
                ", allowed with train.mode async is 1; use sync, or more replicas "
                "(parallel.data)");
      }
    }
  }

  void Adam(const std::string& path, const v1::AdamSpec& adam) {
    Positive(path + ".learning_rate", adam.learning_rate());
    BelowOne(path + ".beta1", adam.beta1());
    BelowOne(path + ".beta2", adam.beta2());
    Positive(path + ".epsilon", adam.epsilon());
    NotNegative(path + ".weight_decay", adam.weight_decay());
  }

  void Optimizer() {
    const v1::OptimizerSpec& optimizer = spec_.optimizer();
    switch (optimizer.rule_case()) {
      case v1::OptimizerSpec::kSgd:
        Positive("optimizer.sgd.learning_rate", optimizer.sgd().learning_rate());
        BelowOne("optimizer.sgd.momentum", optimizer.sgd().momentum());
        break;
      case v1::OptimizerSpec::kAdam:
        Adam("optimizer.adam", optimizer.adam());
        break;
      case v1::OptimizerSpec::kAdamw:
        Adam("optimizer.adamw", optimizer.adamw());
        break;
      case v1::OptimizerSpec::RULE_NOT_SET:
        Problem("optimizer: found no rule, expected one of sgd, adam, adamw");
        break;
    }
    NotNegative("optimizer.clip_norm", optimizer.clip_norm());
    const v1::ScheduleSpec& schedule = optimizer.schedule();
    if (schedule.has_cosine()) NotNegative("optimizer.schedule.cosine.final", schedule.cosine().final());
    if (schedule.has_linear()) NotNegative("optimizer.schedule.linear.final", schedule.linear().final());
    if (optimizer.has_schedule() && schedule.kind_case() == v1::ScheduleSpec::KIND_NOT_SET) {
      Problem("optimizer.schedule: found no kind, expected one of cosine, linear (or leave the schedule out)");
    }
  }

  void Parallel(bool sound_model) {
    for (std::string& problem : MeshProblems(spec_, sound_model)) problems_.push_back(std::move(problem));
  }

  void Transfer() {
    const v1::PushSpec& push = spec_.transfer().push();
    if (push.has_top_k()) {
      const double density = push.top_k().density();
      if (!(density > 0 && density <= 1)) {
        Problem("transfer.push.top_k.density: found ", density, ", allowed more than 0 to 1; 0.01 sends every 100th");
      }
      Whole("transfer.push.top_k.warmup_rounds", push.top_k().warmup_rounds(), 0, spec_.train().rounds());
    }
    const bool lossy = PushEncoding(spec_) != v1::F32;
    if (push.has_error_feedback() && push.error_feedback() && !lossy) {
      Problem(
          "transfer.push.error_feedback: found true beside f32, which loses nothing; leave it out, or choose one of "
          "bf16, f16, int8, top_k");
    }
    if (spec_.transfer().host_sum() == v1::TransferSpec::ON &&
        (lossy || spec_.train().mode() == v1::TrainSpec::ASYNC)) {
      Problem(
          "transfer.host_sum: found ON with ",
          lossy ? absl::StrCat("transfer.push ", absl::AsciiStrToLower(EncodingName(PushEncoding(spec_))))
                : std::string("train.mode async"),
          ", where workers of one host have nothing to add up; leave it out (AUTO), or take push f32 and mode sync");
    }
  }

  void Rest() {
    Later("copies", spec_.copies(), 1);
    Whole("checkpoint.keep", spec_.checkpoint().keep(), 1, std::numeric_limits<uint32_t>::max());
    const std::string& directory = spec_.checkpoint().directory();
    Text("checkpoint.directory", directory);
    bool leads_out = absl::StartsWith(directory, "/");
    for (const auto& part : absl::StrSplit(directory, '/')) leads_out |= part == "..";
    if (leads_out) {
      Problem("checkpoint.directory: found \"", absl::Utf8SafeCEscape(directory.substr(0, 200)),
              "\", allowed is a folder below the daemons' --checkpoint_root: no '/' at the start, no '..'");
    }
    Text("init.path", spec_.init().path());
    if (spec_.init().resume() && spec_.init().path().empty()) {
      Problem("init.resume: found true without init.path; expected the folder of the checkpoint to resume from");
    }
  }

  // Each factor is within its range here.
  void Products() {
    const v1::TrainSpec& train = spec_.train();
    if (static_cast<unsigned __int128>(train.rounds()) * train.batch() > kMaxPositions) {
      Problem("train.rounds: found ", train.rounds(), ", which with train.batch ", train.batch(),
              " makes more than 2^62 samples; lower one of them");
    }
    Activations();
    const absl::StatusOr<ParameterSpace> space = MakeParameterSpace(spec_.model());
    if (!space.ok()) return Problem(space.status().message());
    if (space->size() > kMaxParameters) {
      return Problem("model: found ", space->size(), " parameters, allowed at most 2^42; make it smaller");
    }
    const uint64_t forced = spec_.parallel().chunk_elements();
    const uint64_t chunk = forced > 0 ? forced : DefaultChunkElements(space->size());
    const uint64_t chunks = (space->size() + chunk - 1) / chunk;
    if (chunks > kMaxChunks) {
      Problem("parallel.chunk_elements: found ", forced, ", which cuts ", space->size(), " parameters into ", chunks,
              " chunks, allowed at most 2^24; set it to ", (space->size() + kMaxChunks - 1) / kMaxChunks,
              " or more, or leave it out");
    }
  }

  // The largest tensor of a microbatch has to be one that 64-bit sizes in bytes can name with room to spare.
  void Activations() {
    const Range slots = ReplicaSlots(spec_.train().batch(), 0, spec_.parallel().data());
    const uint64_t rows = MicrobatchSlots(slots, 0, spec_.parallel().microbatches()).size();
    unsigned __int128 elements = rows;
    if (spec_.model().has_gpt2()) {
      const v1::Gpt2Spec& gpt2 = spec_.model().gpt2();
      const uint64_t scores = uint64_t{gpt2.heads()} * gpt2.context();  // of one position
      elements *= gpt2.context();
      elements *= std::max({scores, uint64_t{4} * gpt2.width(), uint64_t{gpt2.vocabulary()}});
    } else {
      const ClassifierSizes sizes = *ClassifierSizesOf(spec_.model());
      uint64_t widest = std::max(sizes.inputs, sizes.classes);
      for (const uint64_t width : spec_.model().mlp().hidden()) widest = std::max(widest, width);
      elements *= widest;
    }
    if (elements > kMaxActivations) {
      Problem("train.batch: found ", spec_.train().batch(), ", with which one tensor of a microbatch of ", rows,
              " samples has more than 2^44 elements; lower it, or raise parallel.microbatches");
    }
  }

  const v1::JobSpec& spec_;
  std::vector<std::string> problems_;
};

}  // namespace

absl::Status ValidateJobSpec(const v1::JobSpec& spec) { return Checker(spec).Check(); }

}  // namespace sluice
