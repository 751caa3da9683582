#include "worker/data/dataset.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>

#include "tests/common/temporary_folder.h"
#include "worker/data/sources.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

class DatasetTest : public testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return (folder_ / name).string();
  }

  static v1::JobSpec Gpt(uint32_t context, uint32_t vocabulary = 0) {
    v1::JobSpec spec;
    spec.mutable_model()->mutable_gpt2()->set_context(context);
    spec.mutable_model()->mutable_gpt2()->set_vocabulary(vocabulary);
    return spec;
  }
  v1::JobSpec Text(const std::string& bytes, uint32_t context, double fraction = 0.1) const {
    v1::JobSpec spec = Gpt(context);
    spec.mutable_data()->mutable_text()->set_path(Write("text.txt", bytes));
    spec.mutable_data()->mutable_text()->set_invalid_utf8(v1::TextSource::KEEP);
    spec.mutable_data()->set_validation_fraction(fraction);
    return spec;
  }
  v1::JobSpec Rows(const std::string& lines, uint32_t context = 8, uint32_t vocabulary = 10) const {
    v1::JobSpec spec = Gpt(context, vocabulary);
    spec.mutable_data()->mutable_rows()->set_path(Write("rows.jsonl", lines));
    spec.mutable_data()->set_shuffle(false);
    spec.mutable_data()->set_validation_fraction(0);
    return spec;
  }
  static v1::JobSpec Idx(const std::string& images, const std::string& labels) {
    v1::JobSpec spec;
    spec.mutable_model()->mutable_mlp();
    spec.mutable_data()->mutable_idx()->set_images(images);
    spec.mutable_data()->mutable_idx()->set_labels(labels);
    return spec;
  }

  const TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path();
};

std::string Distinct(size_t n) {  // noise: any 7 bytes of it occur once
  std::mt19937 random(5);
  std::string s;
  for (size_t i = 0; i < n; ++i) s.push_back(static_cast<char>(random() >> 11));
  return s;
}

std::string Refusal(const v1::JobSpec& spec, absl::StatusCode code, const std::string& root = "") {
  auto data = OpenDataset(spec, root);
  if (data.ok()) {
    ADD_FAILURE() << "accepted";
    return "";
  }
  EXPECT_EQ(data.status().code(), code) << data.status();
  return std::string(data.status().message());
}

testing::AssertionResult Has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << text << "' lacks '" << part << "'";
}

std::string Row(const Batch& b, const std::vector<int32_t>& from, int64_t row) {
  std::string s;
  for (int64_t t = 0; t < b.length; ++t) s.push_back(static_cast<char>(from[row * b.length + t]));
  return s;
}

bool SameBatch(const Batch& a, const Batch& b) {
  return a.rows == b.rows && a.length == b.length && a.tokens == b.tokens && a.targets == b.targets &&
         a.features == b.features && a.labels == b.labels && a.count == b.count;
}

TEST_F(DatasetTest, EveryBlockOfAnEpochExactlyOnceAtOnePhase) {
  const std::string text = Distinct(1000);
  for (uint32_t context : {1, 7, 16, 64}) {
    auto data = OpenDataset(Text(text, context, 0.1), "");
    ASSERT_TRUE(data.ok()) << data.status();
    const uint64_t n = (*data)->train_samples();
    const uint64_t blocks = 999 / context;
    EXPECT_EQ((*data)->eval_samples(), blocks / 10);
    EXPECT_GE(n + 1, blocks - blocks / 10);
    std::set<size_t> phases;
    for (uint64_t epoch = 0; epoch < 6; ++epoch) {
      const Batch b = (*data)->Train({epoch * n, (epoch + 1) * n});
      ASSERT_EQ(b.rows, static_cast<int64_t>(n));
      EXPECT_EQ(b.count, b.rows * b.length);
      std::set<size_t> starts;
      for (int64_t r = 0; r < b.rows; ++r) {
        const std::string input = Row(b, b.tokens, r), target = Row(b, b.targets, r);
        const size_t at = text.find(input + target.back());
        if (context >= 7) {  // long enough to be unique in the text
          ASSERT_NE(at, std::string::npos);
          EXPECT_EQ(target, text.substr(at + 1, context));
          starts.insert(at);
          phases.insert(at % context);
          EXPECT_LE(at + context, (blocks - blocks / 10) * context) << "reads held-out bytes";
        }
      }
      if (context >= 7) {
        EXPECT_EQ(starts.size(), n);
        const size_t first = *starts.begin() % context;
        for (size_t s : starts) EXPECT_EQ(s % context, first);
      }
    }
    if (context >= 7) EXPECT_GT(phases.size(), 1u) << "the phase never moves";
  }
}

TEST_F(DatasetTest, HeldOutBlocksAreTheLastOnesInFileOrder) {
  const std::string text = Distinct(641);
  auto data = OpenDataset(Text(text, 64, 0.2), "");
  ASSERT_TRUE(data.ok());
  ASSERT_EQ((*data)->eval_samples(), 2u);
  const Batch b = (*data)->Evaluation({0, 2});
  EXPECT_EQ(Row(b, b.tokens, 0), text.substr(512, 64));
  EXPECT_EQ(Row(b, b.tokens, 1), text.substr(576, 64));
  EXPECT_EQ(Row(b, b.targets, 1), text.substr(577, 64));
}

TEST_F(DatasetTest, IsAFunctionOfPositionsAlone) {
  const v1::JobSpec spec = Text(Distinct(3000), 16);
  auto data = OpenDataset(spec, ""), again = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok() && again.ok());
  const uint64_t n = (*data)->train_samples();
  const Range range{n - 5, n + 9};  // over the end of an epoch
  const Batch whole = (*data)->Train(range);
  EXPECT_TRUE(SameBatch(whole, (*again)->Train(range)));
  for (uint64_t p = range.begin; p < range.end; ++p) {
    const Batch one = (*again)->Train({p, p + 1});
    EXPECT_EQ(Row(one, one.tokens, 0), Row(whole, whole.tokens, p - range.begin)) << p;
  }
  const Batch none = (*data)->Train({7, 7});
  EXPECT_EQ(none.rows, 0);
  EXPECT_EQ(none.count, 0);
  EXPECT_TRUE(none.tokens.empty());
  // Far positions are as good as near ones.
  EXPECT_EQ((*data)->Train({uint64_t{1} << 62, (uint64_t{1} << 62) + 3}).rows, 3);
}

TEST_F(DatasetTest, SeedAndEpochChangeTheOrder) {
  v1::JobSpec spec = Text(Distinct(3000), 16);
  auto one = OpenDataset(spec, "");
  spec.mutable_train()->set_seed(1);
  auto default_seed = OpenDataset(spec, "");
  spec.mutable_train()->set_seed(2);
  auto two = OpenDataset(spec, "");
  ASSERT_TRUE(one.ok() && two.ok() && default_seed.ok());
  const uint64_t n = (*one)->train_samples();
  EXPECT_TRUE(SameBatch((*one)->Train({0, n}), (*default_seed)->Train({0, n})));
  EXPECT_FALSE(SameBatch((*one)->Train({0, n}), (*two)->Train({0, n})));
  EXPECT_FALSE(SameBatch((*one)->Train({0, n}), (*one)->Train({n, 2 * n})));
}

TEST_F(DatasetTest, WithoutShufflingFileOrderAndNoPhase) {
  const std::string text = Distinct(161);
  v1::JobSpec spec = Text(text, 16, 0);
  spec.mutable_data()->set_shuffle(false);
  auto data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok());
  ASSERT_EQ((*data)->train_samples(), 10u);
  EXPECT_EQ((*data)->eval_samples(), 0u);
  const Batch b = (*data)->Train({0, 20});
  for (int64_t r = 0; r < 20; ++r) EXPECT_EQ(Row(b, b.tokens, r), text.substr(r % 10 * 16, 16));
}

TEST_F(DatasetTest, TheSmallestTextIsOneBlock) {
  auto data = OpenDataset(Text("abcde", 4), "");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->train_samples(), 1u);
  EXPECT_EQ((*data)->eval_samples(), 0u);
  EXPECT_EQ((*data)->vocabulary(), 256u);
  for (uint64_t p = 0; p < 9; ++p) {
    const Batch b = (*data)->Train({p, p + 1});
    EXPECT_EQ(Row(b, b.tokens, 0), "abcd");
    EXPECT_EQ(Row(b, b.targets, 0), "bcde");
  }
  EXPECT_TRUE(Has(Refusal(Text("abcd", 4), absl::StatusCode::kInvalidArgument),
                  "4 bytes, but a block of model.gpt2.context 4 needs 5"));
  EXPECT_TRUE(Has(Refusal(Text("", 4), absl::StatusCode::kInvalidArgument), "empty"));
}

TEST_F(DatasetTest, EverySizeNearABlockStaysInside) {
  // Sizes around block borders, held-out or not: the checked reads below would fault under the address sanitizer.
  for (size_t bytes = 5; bytes < 60; ++bytes) {
    for (double fraction : {0.0, 0.1, 0.5}) {
      auto data = OpenDataset(Text(Distinct(bytes), 4, fraction), "");
      ASSERT_TRUE(data.ok()) << bytes;
      const uint64_t n = (*data)->train_samples();
      ASSERT_GE(n, 1u);
      EXPECT_EQ((*data)->Train({0, 8 * n}).count, static_cast<int64_t>(8 * n * 4));
      EXPECT_EQ((*data)->Evaluation({0, (*data)->eval_samples()}).count,
                static_cast<int64_t>((*data)->eval_samples() * 4));
    }
  }
}

TEST_F(DatasetTest, TextOutsideASmallVocabulary) {
  v1::JobSpec spec = Text("hello\xc3\xa9world", 4);
  spec.mutable_model()->mutable_gpt2()->set_vocabulary(128);
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "token 195 at byte offset 5"));
}

std::string Tokens(const std::vector<uint16_t>& tokens) {
  std::string s;
  for (uint16_t t : tokens) {
    s.push_back(static_cast<char>(t & 0xff));
    s.push_back(static_cast<char>(t >> 8));
  }
  return s;
}

TEST_F(DatasetTest, TokenFilesLittleEndianWithValidationFile) {
  v1::JobSpec spec = Gpt(2, 60001);
  spec.mutable_data()->set_shuffle(false);
  spec.mutable_data()->mutable_tokens()->set_path(Write("train.bin", Tokens({1, 300, 60000, 4, 5})));
  spec.mutable_data()->mutable_tokens()->set_validation_path(Write("val.bin", Tokens({9, 8, 7})));
  auto data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->train_samples(), 2u);
  EXPECT_EQ((*data)->eval_samples(), 1u);
  EXPECT_EQ((*data)->Train({0, 2}).tokens, (std::vector<int32_t>{1, 300, 60000, 4}));
  EXPECT_EQ((*data)->Train({0, 2}).targets, (std::vector<int32_t>{300, 60000, 4, 5}));
  EXPECT_EQ((*data)->Evaluation({0, 1}).targets, (std::vector<int32_t>{8, 7}));

  spec.mutable_model()->mutable_gpt2()->set_vocabulary(60000);
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "train.bin: token 60000 at byte offset 4"));
  spec.mutable_model()->mutable_gpt2()->set_vocabulary(0);
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "model.gpt2.vocabulary"));
  spec.mutable_model()->mutable_gpt2()->set_vocabulary(60001);
  Write("val.bin", Tokens({9, 8}));
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "val.bin: 2 tokens"));
  Write("val.bin", "abc");
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "odd size of 3 bytes"));
}

TEST_F(DatasetTest, RaggedRowsArePaddedAndEmptyOnesPredictNothing) {
  auto data = OpenDataset(Rows("[1,2,3]\n[]\n [ 4 ,\t5]\r\n[6]\n\n"), "");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->train_samples(), 4u);
  EXPECT_EQ((*data)->eval_samples(), 0u);
  const Batch b = (*data)->Train({0, 5});  // position 4 is row 0 again
  EXPECT_EQ(b.rows, 5);
  EXPECT_EQ(b.length, 2);
  EXPECT_EQ(b.count, 5);
  EXPECT_EQ(b.tokens, (std::vector<int32_t>{1, 2, 0, 0, 4, 0, 0, 0, 1, 2}));
  EXPECT_EQ(b.targets, (std::vector<int32_t>{2, 3, -1, -1, 5, -1, -1, -1, 2, 3}));
  const Batch none = (*data)->Train({1, 2});
  EXPECT_EQ(none.rows, 1);
  EXPECT_EQ(none.count, 0);
  EXPECT_EQ(none.length, 0);
}

TEST_F(DatasetTest, RowsAreShuffledAndHeldOutByRows) {
  std::string lines;
  for (int i = 0; i < 20; ++i)
    lines += std::string("[").append(std::to_string(i)).append(",").append(std::to_string(i)).append("]\n");
  v1::JobSpec spec = Rows(lines, 8, 20);
  spec.mutable_data()->set_shuffle(true);
  spec.mutable_data()->clear_validation_fraction();
  auto data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok()) << data.status();
  ASSERT_EQ((*data)->train_samples(), 18u);
  ASSERT_EQ((*data)->eval_samples(), 2u);
  EXPECT_EQ((*data)->Evaluation({0, 2}).tokens, (std::vector<int32_t>{18, 19}));
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    const Batch b = (*data)->Train({epoch * 18, epoch * 18 + 18});
    EXPECT_EQ(std::set<int32_t>(b.tokens.begin(), b.tokens.end()).size(), 18u);
    EXPECT_FALSE(std::is_sorted(b.tokens.begin(), b.tokens.end()));
  }
  spec.mutable_data()->mutable_rows()->set_validation_path(Write("held.jsonl", "[3,2,1]"));
  data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok());
  EXPECT_EQ((*data)->train_samples(), 20u);
  EXPECT_EQ((*data)->Evaluation({0, 1}).targets, (std::vector<int32_t>{2, 1}));
}

TEST_F(DatasetTest, RowErrorsNameLineAndColumn) {
  const std::map<std::string, std::string> cases = {
      {"[1]\n[1, x]", "rows.jsonl:2:5: a token id"},
      {"[1]\n\n[2]", "rows.jsonl:2:1: '[' expected, found the end of the line"},
      {"[1,2", "rows.jsonl:1:5: ',' or ']' expected"},
      {"[1,]", "rows.jsonl:1:4:"},
      {"[-1]", "rows.jsonl:1:2:"},
      {"[1.5]", "rows.jsonl:1:2: a whole number expected"},
      {"[1e3]", "rows.jsonl:1:2: a whole number expected"},
      {"[01]", "rows.jsonl:1:2:"},
      {"[1] [2]", "rows.jsonl:1:5: end of line expected"},
      {"[3, 10]", "rows.jsonl:1:5: token 10 is outside model.gpt2.vocabulary 10"},
      {"[99999999999999999999999]", "rows.jsonl:1:2: token 99999999999999999999 is outside"},
      {"{\"a\": 1}", "rows.jsonl:1:1: '[' expected, found '{'"},
      {"\xef\xbb\xbf[1]", "found byte 0xef"},
      {"\n \n", "no rows"},
      {"", "no rows"},
      {"[1]\n[1,1,1,1,1,1,1,1,1,1]", "rows.jsonl:2:1: a row of 10 ids; model.gpt2.context 8 takes rows of at most 9"},
  };
  for (const auto& [lines, part] : cases)
    EXPECT_TRUE(Has(Refusal(Rows(lines), absl::StatusCode::kInvalidArgument), part));
}

std::string BigEndian(const std::vector<uint32_t>& words) {
  std::string s;
  for (uint32_t w : words) {
    for (int shift = 24; shift >= 0; shift -= 8) s.push_back(static_cast<char>(w >> shift));
  }
  return s;
}

std::string Gzip(const std::string& bytes) {
  z_stream z{};
  EXPECT_EQ(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&z, bytes.size()) + 64, '\0');
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  z.avail_in = bytes.size();
  z.next_out = reinterpret_cast<Bytef*>(out.data());
  z.avail_out = out.size();
  EXPECT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
  out.resize(z.total_out);
  deflateEnd(&z);
  return out;
}

TEST_F(DatasetTest, IdxRawAndGzipByTheirBytesNotTheirNames) {
  std::string pixels;
  for (int i = 0; i < 10 * 6; ++i) pixels.push_back(static_cast<char>(i * 4));
  const std::string images = BigEndian({0x803, 10, 2, 3}) + pixels;
  const std::string labels = BigEndian({0x801, 10}) + std::string("\0\1\2\3\4\5\4\3\2\1", 10);
  const v1::JobSpec raw = Idx(Write("images.gz", images), Write("labels", labels));
  v1::JobSpec packed = Idx(Write("images-packed", Gzip(images)),
                           Write("labels.idx", Gzip(labels.substr(0, 9)) + Gzip(labels.substr(9))));
  auto a = OpenDataset(raw, ""), b = OpenDataset(packed, "");
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ((*a)->inputs(), 6u);
  EXPECT_EQ((*a)->classes(), 6u);
  EXPECT_EQ((*a)->train_samples(), 9u);
  EXPECT_EQ((*a)->eval_samples(), 1u);
  EXPECT_TRUE(SameBatch((*a)->Train({0, 30}), (*b)->Train({0, 30})));
  const Batch held = (*a)->Evaluation({0, 1});
  EXPECT_EQ(held.labels, std::vector<int32_t>{1});
  ASSERT_EQ(held.features.size(), 6u);
  EXPECT_EQ(held.features[5], (59 * 4) / 255.0f);
  const Batch epoch = (*a)->Train({9, 18});
  std::set<float> firsts;
  for (int i = 0; i < 9; ++i) firsts.insert(epoch.features[i * 6]);
  EXPECT_EQ(firsts.size(), 9u);

  packed.mutable_model()->mutable_mlp()->set_inputs(7);
  EXPECT_TRUE(Has(Refusal(packed, absl::StatusCode::kInvalidArgument), "2 x 3 = 6 pixels, but model.mlp.inputs is 7"));
  packed.mutable_model()->mutable_mlp()->set_inputs(6);
  packed.mutable_model()->mutable_mlp()->set_classes(5);
  EXPECT_TRUE(
      Has(Refusal(packed, absl::StatusCode::kInvalidArgument), "label 5 of sample 5 is outside model.mlp.classes 5"));
  packed.mutable_data()->mutable_idx()->set_validation_images("x");
  EXPECT_TRUE(Has(Refusal(packed, absl::StatusCode::kInvalidArgument), "validation_labels"));
}

TEST_F(DatasetTest, IdxDamage) {
  const std::string labels = Write("labels", BigEndian({0x801, 2}) + std::string(2, '\1'));
  const std::string good = BigEndian({0x803, 2, 2, 2}) + "12345678";
  EXPECT_TRUE(OpenDataset(Idx(Write("x", good), labels), "").ok());
  const std::string packed = Gzip(good);
  std::string flipped = packed;
  flipped[packed.size() - 6] ^= 1;  // the checksum
  struct Case {
    std::string bytes, part;
    absl::StatusCode code;
  };
  const auto invalid = absl::StatusCode::kInvalidArgument, loss = absl::StatusCode::kDataLoss;
  for (const Case& c : std::vector<Case>{
           {good.substr(0, 20), "the header says 8 bytes of elements, 4 are present", loss},
           {good + "99", "2 trailing bytes", invalid},
           {good.substr(0, 11), "within the IDX header, after 11 bytes", loss},
           {"", "the file is empty", loss},
           {BigEndian({0x803, 3, 2, 2}) + std::string(12, 'x'), "3 images", invalid},
           {BigEndian({0x803, 0, 2, 2}), "hold no elements", invalid},
           {BigEndian({0x803, 0xffffffff, 0xffffffff, 0xffffffff}), "too large", invalid},
           {BigEndian({0x803, 0x7fffffff, 0x7fff, 1}), "are present", loss},  // 70 TB are not allocated
           {packed.substr(0, packed.size() - 9), "ends early", loss},
           {packed.substr(0, packed.size() - 4), "ends early", loss},
           {flipped, "damaged gzip stream", loss},
           {packed + "garbage", "not gzip", loss},
       }) {
    EXPECT_TRUE(Has(Refusal(Idx(Write("x", c.bytes), labels), c.code), c.part));
  }
}

TEST_F(DatasetTest, IdxPlaceholdersAreNamed) {
  const std::string labels = Write("labels", std::string("\0\0\x08\x01\0\0\0\x01\2", 9));
  const std::string good = Write("good", std::string("\0\0\x08\x03\0\0\0\1\0\0\0\1\0\0\0\1x", 17));
  const std::string page = Write("images.gz", "\r\n<!doctype HTML>\n<title>404</title>");
  EXPECT_TRUE(Has(Refusal(Idx(page, labels), absl::StatusCode::kInvalidArgument), "images.gz: this is a web page"));
  const std::string pointer = Write("pointer", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
  EXPECT_TRUE(
      Has(Refusal(Idx(good, pointer), absl::StatusCode::kInvalidArgument), "pointer: this is a Git LFS pointer"));
  // Labels outside the model's classes, whatever the kind of model.
  v1::JobSpec spec = Idx(good, labels);
  spec.mutable_model()->mutable_logistic();
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument),
                  "label 2 of sample 0 is outside the two classes, 0 and 1, of model.logistic"));
  spec.mutable_model()->mutable_softmax()->set_classes(2);
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "is outside model.softmax.classes 2"));
  spec.mutable_model()->mutable_softmax()->set_classes(3);
  EXPECT_TRUE(OpenDataset(spec, "").ok());
}

TEST_F(DatasetTest, UnreadableFiles) {
  v1::JobSpec spec = Gpt(4);
  spec.mutable_data()->mutable_text()->set_path((folder_ / "absent.txt").string());
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kNotFound), "absent.txt: cannot be read"));
  spec.mutable_data()->mutable_text()->set_path(folder_.string());
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kNotFound), "has no files"));
  spec.mutable_data()->mutable_text()->set_path("/dev/zero");
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "not a regular file"));
  spec.mutable_data()->mutable_text()->set_path("");
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "data.text.path"));
  spec.mutable_data()->mutable_text()->set_path(
      Write("pointer", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"));
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "Git LFS pointer"));
  EXPECT_TRUE(
      Has(Refusal(Rows("<!doctype HTML>\n[1, 2]\n"), absl::StatusCode::kInvalidArgument), "this is a web page"));
}

TEST_F(DatasetTest, PathsStayUnderTheDataRoot) {
  fs::create_directories(folder_ / "root/sub");
  Write("root/sub/in.txt", "inside the root");
  Write("out.txt", "outside the root");
  fs::create_symlink(folder_ / "out.txt", folder_ / "root/link.txt");
  fs::create_directories(folder_ / "root2");
  Write("root2/in.txt", "beside the root");
  const std::string root = (folder_ / "root").string();
  v1::JobSpec spec = Gpt(4);
  auto with = [&](const std::string& path) {
    spec.mutable_data()->mutable_text()->set_path(path);
    return spec;
  };
  EXPECT_TRUE(OpenDataset(with("sub/in.txt"), root).ok());
  EXPECT_TRUE(OpenDataset(with("sub/../sub/in.txt"), root + "/").ok());
  EXPECT_TRUE(OpenDataset(with(root + "/sub/in.txt"), root).ok());
  EXPECT_TRUE(OpenDataset(with(root + "/sub/in.txt"), "/").ok());
  for (const std::string& path : {std::string("../out.txt"), (folder_ / "out.txt").string(), std::string("link.txt"),
                                  std::string("../root2/in.txt"), std::string("/etc/passwd")}) {
    EXPECT_TRUE(Has(Refusal(with(path), absl::StatusCode::kPermissionDenied, root), "outside the data root"));
  }
}

TEST_F(DatasetTest, ModelAndDataMustFit) {
  v1::JobSpec spec;
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "one of text, tokens, rows, idx"));
  spec.mutable_data()->mutable_text()->set_path("x");
  spec.mutable_model()->mutable_mlp();
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "model.gpt2"));
  spec.mutable_model()->mutable_gpt2();
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "model.gpt2.context"));
  spec.mutable_data()->mutable_idx();
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "model.mlp"));
  spec.mutable_data()->set_validation_fraction(0.6);
  EXPECT_TRUE(Has(Refusal(spec, absl::StatusCode::kInvalidArgument), "data.validation_fraction"));
}

TEST(HeldOut, NeverAllAndAtLeastOneWhereAskedFor) {
  EXPECT_EQ(HeldOut(0, 0.1), 0u);
  EXPECT_EQ(HeldOut(1, 0.5), 0u);
  EXPECT_EQ(HeldOut(2, 0.1), 1u);
  EXPECT_EQ(HeldOut(2, 0.5), 1u);
  EXPECT_EQ(HeldOut(100, 0.1), 10u);
  EXPECT_EQ(HeldOut(109, 0.1), 10u);
  EXPECT_EQ(HeldOut(100, 0), 0u);
}

TEST(EpochOrder, EveryPlaceOfEveryEpochOnce) {
  for (uint64_t n : {1, 2, 3, 5, 64, 1000, 1009}) {
    EpochOrder order(n, 7, true);
    for (uint64_t epoch : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 50}) {
      std::set<uint64_t> seen;
      order.ForEach({epoch * n, epoch * n + n}, [&](const EpochOrder::Epoch& e, uint64_t sample) {
        EXPECT_EQ(e.index, epoch);
        EXPECT_LT(sample, n);
        seen.insert(sample);
      });
      EXPECT_EQ(seen.size(), n);
    }
  }
}

// The shared collection of odd files, each with the verdict that its manifest states.
class NastyFiles : public DatasetTest {
 protected:
  static std::string Shared() {
    const char* shared = std::getenv("SLUICE_SHARED");
    return std::string(shared != nullptr ? shared : SLUICE_SOURCE_DIR "/../shared") + "/data/nasty/";
  }
  static bool Accepted(const std::string& verdict) {
    return verdict.rfind("ACCEPT", 0) == 0 && verdict.find("only if") == std::string::npos;
  }

  // Which spec reads this file; false: of a format that is not ours.
  bool SpecFor(const std::string& file, v1::JobSpec* spec) const {
    if (file.rfind("idx/", 0) == 0) {
      *spec = Idx(Shared() + "idx/ok20-images-idx3-ubyte", Shared() + "idx/ok20-labels-idx1-ubyte");
      auto* idx = spec->mutable_data()->mutable_idx();
      file.find("labels") != std::string::npos ? idx->set_labels(Shared() + file) : idx->set_images(Shared() + file);
    } else {
      return false;
    }
    return true;
  }
};

TEST_F(NastyFiles, GetTheManifestsVerdict) {
  std::ifstream in(Shared() + "MANIFEST.json");
  if (!in) GTEST_SKIP() << "SKIPPED: no shared data at " << Shared() << " (set SLUICE_SHARED)";
  int checked = 0;
  for (const auto& entry : nlohmann::json::parse(in)) {
    const std::string file = entry["file"], verdict = entry["expect"];
    v1::JobSpec spec;
    if (!SpecFor(file, &spec)) continue;
    ++checked;
    auto data = OpenDataset(spec, "");
    EXPECT_EQ(data.ok(), Accepted(verdict)) << file << ": " << verdict << "; " << data.status();
    if (data.ok()) continue;
    const std::string message(data.status().message());
    EXPECT_TRUE(Has(message, file.substr(file.find('/') + 1)));
    const std::map<std::string, std::string> parts = {
        {"idx/truncated_raw-images", "15680 bytes of elements, 15580 are present"},
        {"idx/truncated_gz-images.gz", "gzip stream ends early"},
        {"idx/label_magic_for_images", "0x00000803 expected for IDX images, found 0x00000801"},
        {"idx/little_endian-images", "little-endian"},
        {"idx/trailing_bytes-images", "5 trailing bytes"},
        {"idx/dims_overflow-images", "too large"},
        {"idx/float32_type-images", "element type 0x0d"},
        {"idx/git_lfs_pointer-images.gz", "Git LFS pointer"},
    };
    if (auto it = parts.find(file); it != parts.end()) EXPECT_TRUE(Has(message, it->second));
  }
  EXPECT_GE(checked, 12);
}

}  // namespace
}  // namespace sluice
