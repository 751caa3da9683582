// CSV files: records, columns, schema, data set; and odd files, each with the message that a user needs.
#include <gtest/gtest.h>
#include <zlib.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "tests/common/temporary_folder.h"
#include "worker/data/csv_reader.h"
#include "worker/data/dataset.h"
#include "worker/data/sources.h"
#include "worker/data/table.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using Record = std::vector<std::string>;

class CsvTest : public testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return (folder_ / name).string();
  }
  std::string WriteGzip(const std::string& name, const std::string& bytes) const {
    gzFile file = gzopen((folder_ / name).c_str(), "wb");
    gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
    gzclose(file);
    return (folder_ / name).string();
  }

  // A softmax job on these bytes; nothing is held out, rows in file order.
  v1::JobSpec Spec(const std::string& bytes, const std::string& label) const {
    v1::JobSpec spec;
    spec.mutable_model()->mutable_softmax();
    spec.mutable_data()->mutable_csv()->set_path(Write("train.csv", bytes));
    spec.mutable_data()->mutable_csv()->set_label(label);
    spec.mutable_data()->set_validation_fraction(0);
    spec.mutable_data()->set_shuffle(false);
    return spec;
  }
  // The error, without the folder; "" where it is accepted.
  std::string Refusal(const v1::JobSpec& spec) const {
    const auto data = OpenDataset(spec, "");
    if (data.ok()) return "";
    EXPECT_TRUE(absl::IsInvalidArgument(data.status()) || absl::IsDataLoss(data.status())) << data.status();
    std::string text(data.status().message());
    const std::string folder = folder_.string() + "/";
    for (size_t at; (at = text.find(folder)) != std::string::npos;) text.erase(at, folder.size());
    return text;
  }
  std::string Refusal(const std::string& bytes, const std::string& label = "y") const {
    return Refusal(Spec(bytes, label));
  }

  // Records, then the error where there is one.
  std::vector<Record> Records(const std::string& bytes, std::string* error = nullptr, char delimiter = ',') const {
    auto reader = CsvReader::Open(Write("records.csv", bytes), delimiter);
    EXPECT_TRUE(reader.ok()) << reader.status();
    std::vector<Record> records;
    for (;;) {
      const auto more = (*reader)->Next();
      if (!more.ok()) {
        const std::string text(more.status().message());
        EXPECT_NE(error, nullptr) << text;
        if (error != nullptr) *error = text.substr(text.rfind("records.csv") + 11);
        return records;
      }
      if (!*more) return records;
      records.push_back((*reader)->fields());
    }
  }

  const TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path();
};

testing::AssertionResult Has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << text << "' lacks '" << part << "'";
}

// ---------------------------------------------------------------- records
TEST_F(CsvTest, RecordsByTheRfc) {
  EXPECT_EQ(Records("a,b\n1,2\n"), (std::vector<Record>{{"a", "b"}, {"1", "2"}}));
  EXPECT_EQ(Records("a,b\r\n1,2"), (std::vector<Record>{{"a", "b"}, {"1", "2"}}));
  EXPECT_EQ(Records("\xef\xbb\xbf\"a\",b\n"), (std::vector<Record>{{"a", "b"}}));
  EXPECT_EQ(Records("\"x \"\"y\"\"\",\"1,2\"\n\"l1\nl2\r\nl3\",\n"),
            (std::vector<Record>{{"x \"y\"", "1,2"}, {"l1\nl2\r\nl3", ""}}));
  EXPECT_EQ(Records("\n\na\n\r\n\nb\n\n"), (std::vector<Record>{{"a"}, {"b"}}));
  EXPECT_EQ(Records("\"\"\n"), (std::vector<Record>{{""}}));  // quoted: not a blank line
  EXPECT_EQ(Records(",\n"), (std::vector<Record>{{"", ""}}));
  EXPECT_EQ(Records(""), std::vector<Record>());
  EXPECT_EQ(Records("\r\n"), std::vector<Record>());
  EXPECT_EQ(Records("a;\"b;c\"\n", nullptr, ';'), (std::vector<Record>{{"a", "b;c"}}));
  EXPECT_EQ(Records("a\tb", nullptr, '\t'), (std::vector<Record>{{"a", "b"}}));
}

TEST_F(CsvTest, BrokenRecordsNameTheirLine) {
  const struct {
    std::string bytes, error;
  } cases[] = {
      {"a,b\n1,\"2\n3,4\n", ":2: the file ends within a field whose quote opens here"},
      {"a,\"b\"c\n", ":1: text after the closing quote"},
      {"a,b\n1,2\"3\n", ":2: a quote within column 2"},
      {"a,b\r1,2\r", ":1: a carriage return without a line feed"},
      {"a,\"b\nb\"\nx\ry\n", ":3: a carriage return without"},
      {std::string("a,b\n\0,2\n", 8), ":2: a zero byte"},
      {"\xff\xfe"
       "a",
       ":1: the file looks like UTF-16"},
      {std::string("\xfe\xff\0a", 4), ":1: the file looks like UTF-16"},
      {"a\n\"" + std::string((1 << 20) + 1, 'x') + "\"", ":2: a field of more than 1 MiB"},
      {std::string(1 << 20, ','), ":1: more than 2^20 columns"},
  };
  for (const auto& c : cases) {
    std::string error;
    Records(c.bytes, &error);
    EXPECT_TRUE(Has(error, c.error));
  }
}

// What a writer by the RFC wrote is read back, wherever the reader's buffer ends.
TEST_F(CsvTest, WhatIsWrittenIsReadBack) {
  std::mt19937 random(3);
  const std::string letters = "ab,\"\n\r ;\xc3\xa9";
  for (int round = 0; round < 30; ++round) {
    std::vector<Record> records(1 + random() % 300);
    const size_t columns = 2 + random() % 5;
    std::string bytes;
    for (Record& record : records) {
      for (size_t i = 0; i < columns; ++i) {
        std::string field;
        for (size_t n = random() % 3 == 0 ? random() % 900 : random() % 4; n > 0; --n) {
          field.push_back(letters[random() % letters.size()]);
        }
        const bool quote = random() % 2 == 0 || field.find_first_of("\",\r\n") != std::string::npos;
        std::string doubled;
        for (const char c : field) doubled.append(c == '"' ? 2 : 1, c);
        bytes += (i > 0 ? "," : "") + (quote ? "\"" + doubled + "\"" : field);
        record.push_back(field);
      }
      bytes += random() % 2 == 0 ? "\n" : "\r\n";
    }
    ASSERT_EQ(Records(bytes), records) << "round " << round;
  }
}

// ---------------------------------------------------------------- columns
TEST_F(CsvTest, TheLabelByNameOrIndexAndTheHeaderByItself) {
  const struct {
    std::string bytes, label;
    std::vector<std::string> features;
    uint64_t rows;
  } cases[] = {
      {"a,y,b\n1,k,2\n3,l,4\n", "y", {"a", "b"}, 2},
      {"a,y,b\n1,k,2\n3,l,4\n", "1", {"a", "b"}, 2},
      {"1,k,2\n3,l,4\n", "1", {"0", "2"}, 2},
      {"1,2,k\n3,4,l\n", "-1", {"0", "1"}, 2},
      {"k,1,2\nl,3,4\n", "0", {"1", "2"}, 2},
      {"k,1,2\nl,3,4\n", "-3", {"1", "2"}, 2},
      {"\xef\xbb\xbfy,a\nk,1\nl,2\n", "y", {"a"}, 2},
      {"150,4,setosa\n5.1,3,0\n4,5,1\n", "2", {"0", "1"}, 3},
      {"2019,y,2020\n1,0,2\n", "y", {"2019", "2020"}, 1},  // numbers as names: `label` says that this is a header
  };
  for (const auto& c : cases) {
    const auto data = OpenDataset(Spec(c.bytes, c.label), "");
    ASSERT_TRUE(data.ok()) << c.bytes << data.status();
    const v1::TableSchema& schema = *(*data)->table();
    EXPECT_EQ(std::vector<std::string>(schema.features().begin(), schema.features().end()), c.features) << c.bytes;
    EXPECT_EQ((*data)->train_samples(), c.rows) << c.bytes;
    EXPECT_EQ((*data)->inputs(), c.features.size());
  }
  v1::JobSpec spec = Spec("1,2,0\n3,4,1\n", "-1");
  spec.mutable_data()->mutable_csv()->set_header(v1::CsvSource::YES);
  auto data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->train_samples(), 1u);
  EXPECT_EQ((*data)->table()->features(1), "2");
  spec = Spec("a,y\n1,0\n", "y");
  spec.mutable_data()->mutable_csv()->set_header(v1::CsvSource::NO);
  EXPECT_TRUE(Has(Refusal(spec), "columns are named, but data.csv.header is no"));
  spec.mutable_data()->mutable_csv()->set_label("1");
  EXPECT_TRUE(Has(Refusal(spec), "train.csv:1: column 1: a number is expected, found \"a\""));
}

TEST_F(CsvTest, ColumnsCanBeLeftOut) {
  v1::JobSpec spec = Spec("id,a,text,y\n11,1,\"l1\nl2\",k\n12,2,z,l\n", "y");
  EXPECT_TRUE(Has(Refusal(spec), "train.csv:2: column 3 (\"text\"): a number is expected, found \"l1\\nl2\""));
  spec.mutable_data()->mutable_csv()->add_ignore("text");
  spec.mutable_data()->mutable_csv()->add_ignore("0");
  auto data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->inputs(), 1u);
  EXPECT_EQ((*data)->train_samples(), 2u);
  EXPECT_EQ((*data)->table()->features(0), "a");
  spec.mutable_data()->mutable_csv()->add_ignore("-1");
  EXPECT_TRUE(Has(Refusal(spec), "data.csv.ignore: \"-1\" is the label's column"));
}

TEST_F(CsvTest, MistakesNameFileLineAndColumn) {
  const struct {
    std::string bytes, error;
  } cases[] = {
      {"", "train.csv: the file has no rows"},
      {"\n\n", "train.csv: the file has no rows"},
      {"a,y\n", "train.csv: the file has a header and no rows"},
      {"y\n1\n", "train.csv:1: beside the label no column is left to learn from"},
      {"a,b,y\n1,2,3\n4,5\n6,7,8,9\n", "train.csv:3: 2 of 3 columns"},
      {"a,b,y\n6,7,8,9\n", "train.csv:2: 4 of 3 columns: too many"},
      {"a,b,y\n\"1\n\",2,k\n4,5\n", "train.csv:2: column 1 (\"a\"): a number is expected, found \"1\\n\""},
      {"a,y\n1,k\n,l\n", "train.csv:3: column 1 (\"a\"): the value is missing (\"\")"},
      {"a,y\nNA,k\n", "train.csv:2: column 1 (\"a\"): the value is missing (\"NA\")"},
      {"a,y\nnan,k\n", "the value is missing (\"nan\")"},
      {"a,y\ninf,k\n", "train.csv:2: column 1 (\"a\"): \"inf\" is not finite"},
      {"a,y\n1e39,k\n", "\"1e39\" is not finite, or outside the range of float32"},
      {"a,y\n1e999,k\n", "\"1e999\" is not finite"},
      {"a,y\n0x1p3,k\n", "a number is expected, found \"0x1p3\""},
      {"a,y\n\"2,5\",k\n", "found \"2,5\"; the decimal sign is a point"},
      {"a,y\n1 2,k\n", "a number is expected, found \"1 2\""},
      {"a,y\n1,\n", "train.csv:2: column 2 (\"y\"): the label is missing"},
      {"a,y\n1,0.5\n2,1\n", "train.csv:2: label \"0.5\": labels are classes"},
      {"a,y\n1,inf\n2,1\n", "train.csv:2: label \"inf\": labels are classes"},
      {"a,x\n1,2\n", "data.csv.label: train.csv has no column \"y\"; its header (line 1) names \"a\", \"x\""},
      {"a,y,y\n1,2,3\n", "data.csv.label: train.csv has more than one column \"y\""},
      {"y;x\n1;2,5\n", "the fields look as if they were separated by ';': set data.csv.delimiter to \";\""},
      {"y,t\n0,2015-05-19T19:16:02UTC\n", "train.csv:2: column 2 (\"t\"): a number is expected, found \"2015-05-19T19"},
      {"\xff\xfe\0", "train.csv:1: the file looks like UTF-16"},
      {"a,y\n1,\xff\n2,k\n", "train.csv:2: column 2 (\"y\"): the label is not UTF-8"},
      {"\xe9,y\n1,k\n", "train.csv:1: column 1: its name is not UTF-8"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "train.csv: this is a Git LFS pointer"},
      {"\xef\xbb\xbf\n <!DOCTYPE html><html>", "train.csv: this is a web page, not the data"},
      {"<HTML>\n", "train.csv: this is a web page, not the data"},
  };
  for (const auto& c : cases) EXPECT_TRUE(Has(Refusal(c.bytes), c.error)) << c.bytes;
  EXPECT_TRUE(Has(Refusal("1,2\n", "2"), "data.csv.label: column 2 is outside the 2 columns of train.csv, 0 to 1"));
  EXPECT_TRUE(Has(Refusal("1,2\n", "-3"), "data.csv.label: column -3 is outside"));
  EXPECT_TRUE(Has(Refusal("1,2\n", ""), "data.csv.label: the name or the index"));
}

TEST_F(CsvTest, GzipByItsBytes) {
  v1::JobSpec spec = Spec("", "y");
  std::string bytes = "a,y\n";
  for (int i = 0; i < 20000; ++i) bytes += std::to_string(i) + "," + std::to_string(i % 3) + "\n";
  const std::string path = WriteGzip("table.csv", bytes);
  spec.mutable_data()->mutable_csv()->set_path(path);
  auto data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->train_samples(), 20000u);
  EXPECT_EQ((*data)->classes(), 3u);
  fs::resize_file(path, fs::file_size(path) / 2);
  EXPECT_TRUE(Has(Refusal(spec), "table.csv: the gzip stream ends early"));
}

// ---------------------------------------------------------------- labels and schema
TEST_F(CsvTest, ClassesAreSorted) {
  const auto labels = [&](const std::string& bytes) {
    const auto data = OpenDataset(Spec(bytes, "0"), "");
    EXPECT_TRUE(data.ok()) << data.status();
    std::string all;
    if (!data.ok()) return all;
    for (const std::string& label : (*data)->table()->labels()) all += label + "|";
    for (const int32_t label : (*data)->Train({0, (*data)->train_samples()}).labels) all += std::to_string(label);
    return all;
  };
  EXPECT_EQ(labels("b,1\na,2\nc,3\na,4\n"), "a|b|c|1020");
  EXPECT_EQ(labels("10,1\n9,2\n-1,3\n"), "-1|9|10|210");
  EXPECT_EQ(labels("+1,1\n-1,2\n1.0,3\n1e0,4\n"), "-1|1|1011");
  EXPECT_EQ(labels("10,1\n9,2\nx,3\n"), "10|9|x|012");
  EXPECT_EQ(labels(" b ,1\nb,2\n\"a b\",3\n"), "a b|b|110");
  EXPECT_EQ(labels("1,1\n1,2\n"), "1|00");
}

TEST_F(CsvTest, StandardizedByTheTrainingPart) {
  // Values far from 0, a constant column, one that is 0 but for a row.
  std::string bytes;
  std::mt19937 random(9);
  std::vector<double> values;
  for (int i = 0; i < 500; ++i) {
    values.push_back(1.7e9 + static_cast<double>(random() % 100000) / 7);
    bytes += std::to_string(values.back()) + ",0.1," + (i == 77 ? "5" : "0") + "," + std::to_string(i % 2) + "\n";
    values.back() = std::stod(std::to_string(values.back()));
  }
  v1::JobSpec spec = Spec(bytes, "-1");
  auto data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok()) << data.status();
  const v1::TableSchema& schema = *(*data)->table();
  long double mean = 0, square = 0;
  for (const double v : values) mean += v;
  mean /= 500;
  for (const double v : values) square += (v - mean) * (v - mean);
  const long double deviation = std::sqrt(square / 500);
  EXPECT_NEAR(schema.mean(0), static_cast<double>(mean), 1e-6);
  EXPECT_NEAR(schema.deviation(0), static_cast<double>(deviation), 1e-9 * static_cast<double>(deviation));
  EXPECT_EQ(schema.mean(1), 0.1);
  EXPECT_EQ(schema.deviation(1), 1);
  EXPECT_NEAR(schema.mean(2), 0.01, 1e-15);
  EXPECT_NEAR(schema.deviation(2), std::sqrt(25.0 / 500 - 0.0001), 1e-14);
  const Batch all = (*data)->Train({0, 500});
  double sum = 0, squares = 0;
  for (int i = 0; i < 500; ++i) {
    EXPECT_EQ(all.features[3 * i], static_cast<float>((values[i] - schema.mean(0)) / schema.deviation(0)));
    EXPECT_EQ(all.features[3 * i + 1], 0);
    sum += all.features[3 * i];
    squares += double{all.features[3 * i]} * all.features[3 * i];
  }
  EXPECT_NEAR(sum / 500, 0, 1e-6);
  EXPECT_NEAR(squares / 500, 1, 1e-5);

  spec.mutable_data()->mutable_csv()->set_standardize(false);
  data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->table()->mean_size(), 0);
  EXPECT_EQ((*data)->Train({0, 1}).features[1], 0.1f);
}

TEST_F(CsvTest, HeldOutRowsAreDrawnFromAllOfTheTable) {
  std::string sorted = "a,y\n";  // by class
  for (int i = 0; i < 300; ++i) sorted += std::to_string(i) + "," + std::to_string(i / 100) + "\n";
  v1::JobSpec spec = Spec(sorted, "y");
  spec.mutable_data()->clear_validation_fraction();
  spec.mutable_data()->mutable_csv()->set_standardize(false);
  std::vector<float> first;
  for (const uint64_t seed : {1, 2}) {
    spec.mutable_train()->set_seed(seed);
    auto data = OpenDataset(spec, "");
    ASSERT_TRUE(data.ok()) << data.status();
    ASSERT_EQ((*data)->train_samples(), 270u);
    ASSERT_EQ((*data)->eval_samples(), 30u);
    const Batch train = (*data)->Train({0, 270}), held = (*data)->Evaluation({0, 30});
    EXPECT_EQ(std::set<int32_t>(held.labels.begin(), held.labels.end()).size(), 3u);
    EXPECT_TRUE(std::is_sorted(held.features.begin(), held.features.end()));
    std::set<float> seen(train.features.begin(), train.features.end());
    seen.insert(held.features.begin(), held.features.end());
    EXPECT_EQ(seen.size(), 300u);
    if (seed == 1) first = held.features;
    EXPECT_EQ(held.features, first) << "the seed must not move rows into the held-out part";
  }
  // Means are those of the training part alone.
  spec.mutable_data()->mutable_csv()->set_standardize(true);
  double mean = 299.0 * 300 / 2;
  for (const float value : first) mean -= value;
  EXPECT_DOUBLE_EQ((*OpenDataset(spec, ""))->table()->mean(0), mean / 270);
}

TEST_F(CsvTest, AValidationFileUsesTheTrainingPartsNumbers) {
  v1::JobSpec spec = Spec("a,b,y\n1,10,k\n3,30,l\n", "y");
  spec.mutable_data()->mutable_csv()->set_validation_path(Write("test.csv", "a,b,y\n5,20,l\n5,40,k\n2,20,l\n"));
  auto data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->train_samples(), 2u);
  EXPECT_EQ((*data)->eval_samples(), 3u);
  const Batch test = (*data)->Evaluation({0, 3});
  EXPECT_EQ(test.features, (std::vector<float>{3, 0, 3, 2, 0, 0}));
  EXPECT_EQ(test.labels, (std::vector<int32_t>{1, 0, 1}));
  const struct {
    std::string bytes, error;
  } cases[] = {
      {"a,b,y\n5,20,l\n5,40,m\n", "test.csv:3: label \"m\" is not among the classes of the training file: k, l"},
      {"b,a,y\n5,20,l\n", "test.csv:1: column 1 is \"b\", but \"a\" was trained on there"},
      {"a,b,c,y\n5,20,1,l\n", "test.csv: 3 columns of features, but 2 were trained on"},
      {"a,b,z\n5,20,l\n", "test.csv has no column \"y\""},
      {"a,b,y\n5,20,l\n,1,k\n", "test.csv:3: column 1 (\"a\"): the value is missing"},
      {"a,b,y\n", "test.csv: the file has a header and no rows"},
  };
  for (const auto& c : cases) {
    Write("test.csv", c.bytes);
    EXPECT_TRUE(Has(Refusal(spec), c.error)) << c.bytes;
  }
  spec = Spec("a,b,y\n1,10,k\n3,30,l\n", "-1");
  spec.mutable_data()->mutable_csv()->set_validation_path(Write("test.csv", "5,20,l\n"));
  EXPECT_TRUE(Has(Refusal(spec), "test.csv: the file has no header, but the training file's names its columns"));
}

// A checkpoint's schema stays in force whatever the training file holds now.
TEST_F(CsvTest, AGivenSchemaIsUsedNotMadeAnew) {
  v1::JobSpec spec = Spec("a,y\n1,k\n3,l\n", "y");
  *spec.mutable_data()->mutable_csv()->mutable_schema() = *(*OpenDataset(spec, ""))->table();
  Write("train.csv", "a,y\n100,l\n200,l\n");
  auto data = OpenDataset(spec, "");
  ASSERT_TRUE(data.ok()) << data.status();
  const Batch batch = (*data)->Train({0, 2});
  EXPECT_EQ(batch.features, (std::vector<float>{98, 198}));
  EXPECT_EQ(batch.labels, (std::vector<int32_t>{1, 1}));
  Write("train.csv", "a,y\n1,k\n3,new\n");
  EXPECT_TRUE(Has(Refusal(spec), "train.csv:3: label \"new\" is not among the classes of the training file: k, l"));
  spec.mutable_data()->mutable_csv()->mutable_schema()->set_deviation(0, 1e-300);
  Write("train.csv", "a,y\n1,k\n3,l\n");
  EXPECT_TRUE(Has(Refusal(spec), "train.csv:2: column 1: 1 is far outside of what was trained on"));
}

TEST_F(CsvTest, ModelAndTableMustFit) {
  v1::JobSpec spec = Spec("a,b,y\n1,10,k\n3,30,l\n4,5,m\n", "y");
  spec.mutable_model()->mutable_logistic();
  EXPECT_TRUE(Has(Refusal(spec), "train.csv: 3 classes, but model.logistic tells two apart; use model.softmax"));
  spec.mutable_model()->mutable_softmax()->set_classes(2);
  EXPECT_TRUE(Has(Refusal(spec), "train.csv: 3 classes, but model.softmax.classes is 2"));
  spec.mutable_model()->mutable_mlp()->set_inputs(3);
  EXPECT_TRUE(Has(Refusal(spec), "train.csv: 2 columns of features, but model.mlp.inputs is 3"));
  spec.mutable_model()->mutable_gpt2();
  EXPECT_TRUE(Has(Refusal(spec), "which model.mlp, model.softmax and model.logistic take"));
}

// ---------------------------------------------------------------- the shared collection
TEST_F(CsvTest, NastyFilesGetTheManifestsVerdict) {
  const char* given = std::getenv("SLUICE_SHARED");
  const std::string shared = std::string(given != nullptr ? given : SLUICE_SOURCE_DIR "/../shared") + "/data/nasty/";
  std::ifstream in(shared + "MANIFEST.json");
  if (!in) GTEST_SKIP() << "SKIPPED: no shared data at " << shared << " (set SLUICE_SHARED)";
  const struct {
    std::string file, label;
    bool accepted;
    std::string error;  // or the first feature's name
  } cases[] = {
      {"csv/bom_header.csv", "label", true, "a"},
      {"csv/bom_quoted_header.csv", "label", true, "a"},
      {"csv/quoted_newline.csv", "y", true, "id"},
      {"csv/ragged.csv", "c", false, "ragged.csv:3: 2 of 3 columns"},
      {"csv/colon_in_csv.csv", "y", false, "column 2 (\"t\"): a number is expected"},
      {"csv/semicolon.csv", "y", false, "set data.csv.delimiter to \";\""},
      {"csv/utf16.csv", "y", false, "looks like UTF-16"},
  };
  size_t in_manifest = 0;
  for (const auto& entry : nlohmann::json::parse(in)) {
    in_manifest += entry["file"].get<std::string>().rfind("csv/", 0) == 0;
  }
  EXPECT_EQ(in_manifest, std::size(cases));
  for (const auto& c : cases) {
    v1::JobSpec spec = Spec("", c.label);
    spec.mutable_data()->mutable_csv()->set_path(shared + c.file);
    if (c.file == "csv/quoted_newline.csv") spec.mutable_data()->mutable_csv()->add_ignore("description");
    const auto data = OpenDataset(spec, "");
    ASSERT_EQ(data.ok(), c.accepted) << c.file << data.status();
    if (!c.accepted) {
      EXPECT_TRUE(Has(std::string(data.status().message()), c.error));
      continue;
    }
    EXPECT_EQ((*data)->table()->features(0), c.error) << c.file;
    EXPECT_EQ((*data)->train_samples(), c.file == "csv/quoted_newline.csv" ? 2u : 1u);
  }
}

}  // namespace
}  // namespace sluice
