// `sluice sample` and `sluice export`: what they print of models with and without a tokenizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "client/commands.h"
#include "client/model_files.h"
#include "common/checkpoint.h"
#include "common/layout.h"
#include "common/model_layout.h"
#include "common/philox.h"
#include "common/utf8.h"
#include "tests/common/temporary_folder.h"

namespace sluice {
namespace {

using testing::HasSubstr;
using testing::MatchesRegex;

class SampleTest : public testing::Test {
 protected:
  // An exported folder of a small model with random values.
  std::string Export(const std::string& name, uint32_t vocabulary) const {
    v1::ModelSpec model;
    v1::Gpt2Spec* gpt2 = model.mutable_gpt2();
    gpt2->set_layers(1);
    gpt2->set_heads(2);
    gpt2->set_width(16);
    gpt2->set_context(8);
    gpt2->set_vocabulary(vocabulary);
    gpt2->set_layer_norm_epsilon(1e-5);
    const auto space = MakeParameterSpace(model);
    EXPECT_TRUE(space.ok()) << space.status();
    std::vector<float> values(space->size());
    for (const Tensor& tensor : space->tensors()) {
      FillInitial(tensor, 7, 0, tensor.elements, values.data() + tensor.offset);
    }
    EXPECT_TRUE(ExportGpt2(*gpt2, values, folder_ / name).ok());
    return folder_ / name;
  }
  // The bytes and one more token, "é!".
  void WriteTokenizer(const std::string& folder) const {
    std::string vocab = Gpt2Bpe::Bytes()->VocabText();
    vocab.resize(vocab.size() - 2);
    std::filesystem::create_directories(folder);
    Spill(folder + "/encoder.json", vocab + ", \"\\u00c3\\u00a9!\": 256}");
    Spill(folder + "/vocab.bpe", "");
  }
  int Run(const std::vector<std::string>& words) {
    out_.str("");
    err_.str("");
    ClientEnvironment environment;
    environment.out = &out_;
    environment.err = &err_;
    environment.getenv = [](const std::string&) { return ""; };
    environment.interrupt = &interrupt_;
    return RunClient(words, environment);
  }

  TemporaryFolder folder_;
  std::ostringstream out_, err_;
  Interrupt interrupt_;
};

TEST_F(SampleTest, ModelsOfBytesPrintWholeCharactersOnly) {
  const std::string model = Export("bytes", 256);
  for (const char* seed : {"1", "2", "3", "4", "5"}) {
    // An untrained model draws noise, most of it no UTF-8.
    ASSERT_EQ(Run({"sample", model, "--prompt", "caf\xc3\xa9", "--bytes=97", "--seed", seed}), kExitOk) << err_.str();
    EXPECT_THAT(out_.str(), HasSubstr("caf\xc3\xa9"));
    EXPECT_EQ(FirstInvalidUtf8(out_.str()), std::string::npos);
  }
  const std::string first = out_.str();
  Run({"sample", model, "--prompt", "caf\xc3\xa9", "--bytes=97", "--seed=5"});
  EXPECT_EQ(out_.str(), first);
  Run({"sample", model, "--bytes=20", "--temperature=0"});
  const std::string greedy = out_.str();
  for (const char* cut : {"--top_k=1", "--top_p=0"}) {
    Run({"sample", model, "--bytes=20", "--temperature=5", cut});
    EXPECT_EQ(out_.str(), greedy) << cut;
  }
  EXPECT_EQ(Run({"sample", model, "--top_p=1.5"}), kExitUsage);
  EXPECT_EQ(Run({"sample", model, "--top_k=-1"}), kExitUsage);
}

TEST_F(SampleTest, WithoutATokenizerTokensAreNumbers) {
  const std::string model = Export("numbers", 257);
  ASSERT_EQ(Run({"sample", model, "--bytes=3"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), MatchesRegex("[0-9]+ [0-9]+ [0-9]+\n"));
  EXPECT_EQ(Run({"sample", model, "--prompt=a"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("no tokenizer in it"));
  EXPECT_THAT(err_.str(), HasSubstr("--tokenizer"));
  EXPECT_EQ(Run({"sample", model, "--tokenizer", folder_ / "absent"}), kExitUsage);
  WriteTokenizer(folder_ / "tok");
  ASSERT_EQ(Run({"sample", model, "--tokenizer", folder_ / "tok", "--prompt=abc", "--bytes=40"}), kExitOk)
      << err_.str();
  EXPECT_EQ(out_.str().substr(0, 3), "abc");
  EXPECT_EQ(FirstInvalidUtf8(out_.str()), std::string::npos);
}

TEST_F(SampleTest, AnExportWithATokenizerIsWholeOrNotThere) {
  const std::string model = Export("numbers", 257), target = folder_ / "target";
  EXPECT_EQ(Run({"export", model, target, "--tokenizer", folder_ / "absent"}), kExitUsage);
  EXPECT_FALSE(std::filesystem::exists(target));
  WriteTokenizer(folder_ / "tok");
  ASSERT_EQ(Run({"export", model, target, "--tokenizer", folder_ / "tok"}), kExitOk) << err_.str();
  EXPECT_EQ(err_.str(), "");
  for (const char* name : {"config.json", "model.safetensors", "vocab.json", "merges.txt", "tokenizer_config.json"}) {
    EXPECT_TRUE(std::filesystem::exists(target + "/" + name)) << name;
  }
}

TEST_F(SampleTest, ATokenizerInTheFolderIsUsed) {
  const std::string model = Export("bpe", 257);
  WriteTokenizer(model);
  ASSERT_EQ(Run({"sample", model, "--prompt=abc", "--bytes=40"}), kExitOk) << err_.str();
  EXPECT_EQ(out_.str().substr(0, 3), "abc");
  Spill(model + "/encoder.json", "{");
  EXPECT_EQ(Run({"sample", model, "--prompt=abc"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("encoder.json:1: not the JSON of a vocabulary"));
}

}  // namespace
}  // namespace sluice
