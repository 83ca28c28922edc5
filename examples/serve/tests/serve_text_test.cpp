// From tokens to what a client sees: characters that are cut into tokens, bytes that are none, stop
// strings however the text is cut; salts and their numbers.
#include <doctest/doctest.h>

#include <set>
#include <string>
#include <vector>

#include "server/choice_text.hpp"
#include "server/stop_strings.hpp"
#include "server/tenants.hpp"
#include "server/utf8_stream.hpp"
#include "tests/support/random.hpp"
#include "text/unicode.hpp"

using namespace serve;

namespace {

/// The text in pieces of random sizes, some of them empty.
std::vector<std::string> cut(const std::string& text, test::Random& random) {
  std::vector<std::string> pieces;
  for (std::size_t at = 0; at < text.size();) {
    const auto size = static_cast<std::size_t>(random.uniform(0, 4));
    pieces.push_back(text.substr(at, size));
    at += size;
  }
  return pieces;
}

bool is_whole_utf8(const std::string& text) {
  for (const Character& character : characters(text))
    if (character.begin < text.size() && character.code_point < 0) return false;
  return true;
}

std::string random_text(test::Random& random, int size) {
  const std::string characters[] = {"a", "b",  "\n",           "é",  "ß",
                                    "€", "日", "\xed\x9f\xbf", "😀", "\xf4\x8f\xbf\xbf"};
  std::string text;
  for (int i = 0; i < size; ++i) text += random.pick(characters);
  return text;
}

std::string through(Utf8Stream stream, const std::vector<std::string>& pieces) {
  std::string all;
  for (const std::string& piece : pieces) {
    const std::string out = stream.push(piece);
    CHECK(is_whole_utf8(out));
    all += out;
  }
  return all + stream.finish();
}

struct Stopped {
  std::string text, found;
  bool operator==(const Stopped&) const = default;
};

/// \param passed  pieces in which none ends the text
Stopped through(StopStrings stop, const std::vector<std::string>& pieces, std::size_t passed) {
  std::string text;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    text += stop.push(pieces[i], i >= passed);
    if (!stop.found().empty()) return {text, stop.found()};
  }
  return {text + stop.finish(), ""};
}

/// The same, letter by letter as it is meant: the first moment at which the text ends with a stop
/// string, of those that end there the longest.
/// \param passed  bytes in which none ends the text
Stopped expected(const std::vector<std::string>& stop, const std::string& text,
                 std::size_t passed) {
  for (std::size_t end = passed + 1; end <= text.size(); ++end) {
    std::string longest;
    for (const std::string& one : stop)
      if (text.substr(0, end).ends_with(one) && one.size() > longest.size()) longest = one;
    if (!longest.empty()) return {text.substr(0, end - longest.size()), longest};
  }
  return {text, ""};
}

}  // namespace

TEST_CASE("characters come out whole, wherever they are cut") {
  test::Random random(1);
  for (int i = 0; i < test::scaled(500); ++i) {
    const std::string text = random_text(random, random.uniform(0, 20));
    CHECK(through(Utf8Stream(), cut(text, random)) == text);
  }
}

TEST_CASE("any bytes become valid characters, the same however they are cut") {
  test::Random random(2);
  for (int i = 0; i < test::scaled(500); ++i) {
    std::string bytes = random_text(random, random.uniform(1, 8));
    for (int k = random.uniform(1, 6); k > 0; --k)
      bytes[random.index(bytes.size())] = static_cast<char>(random.uniform(0, 255));
    const std::string whole = through(Utf8Stream(), {bytes});
    CHECK(is_whole_utf8(whole));
    CHECK(through(Utf8Stream(), cut(bytes, random)) == whole);
  }
  const std::string r = "\xef\xbf\xbd";
  const auto decoded = [](const std::string& bytes) { return through(Utf8Stream(), {bytes}); };
  CHECK(decoded("a\xff"
                "b") == "a" + r + "b");
  CHECK(decoded("\xc0\xaf") == r + r);          // overlong
  CHECK(decoded("\xed\xa0\x80") == r + r + r);  // a surrogate
  CHECK(decoded("\xf4\x90\x80\x80") == r + r + r + r);
  CHECK(decoded("\xf0\x9f\x98!") == r + "!");  // half a character, then another
  CHECK(decoded("\xf0\x9f\x98") == r);         // and at the end
  CHECK(decoded("\xe2\x82\xe2\x82\xac") == r + "€");
}

TEST_CASE("half a character is held back until the rest is there") {
  Utf8Stream stream;
  CHECK(stream.push("x\xf0\x9f") == "x");
  CHECK(stream.push("\x98").empty());
  CHECK(stream.push("\x80y") == "😀y");
  CHECK(stream.finish().empty());
}

TEST_CASE("a text ends before the first stop string, however it is cut") {
  test::Random random(3);
  // Two letters: most texts have stop strings, halves of them, and some within others.
  const auto letters = [&](int least, int most) {
    std::string text;
    for (int n = random.uniform(least, most); n > 0; --n) text += random.chance(0.5) ? "a" : "b";
    return text;
  };
  for (int i = 0; i < test::scaled(2000); ++i) {
    std::vector<std::string> stop;
    for (int n = random.uniform(0, 4); n > 0; --n) stop.push_back(letters(1, 6));
    const std::string text = letters(0, 30);
    const std::vector<std::string> pieces = cut(text, random);
    const std::size_t passed = random.chance(0.5) ? 0 : random.index(pieces.size() + 1);
    std::size_t bytes = 0;
    for (std::size_t at = 0; at < passed; ++at) bytes += pieces[at].size();
    CHECK(through(StopStrings(stop), pieces, passed) == expected(stop, text, bytes));
  }
}

TEST_CASE("no more is held back than may begin a stop string") {
  StopStrings stop({"\n\nUser:", "END"});
  CHECK(stop.push("Paris.\n") == "Paris.");
  CHECK(stop.push("x") == "\nx");
  CHECK(stop.push("EN").empty());
  CHECK(stop.push("E") == "EN");
  CHECK(stop.push("ND of it").empty());
  CHECK_FALSE(stop.found().empty());
}

TEST_CASE("a stop string is found across tokens and across characters that are cut") {
  const auto tokenizer = byte_tokenizer(300);
  test::Random random(4);
  for (int i = 0; i < test::scaled(300); ++i) {
    const std::string before = random_text(random, random.uniform(0, 6));
    const std::string stop = "😀" + random_text(random, random.uniform(0, 3)) + "!";
    const std::string text = before + stop + random_text(random, 3);
    ChoiceText choice(*tokenizer, -1, {stop});
    std::string said;
    for (const int token : tokenizer->encode_prompt(text)) {
      if (choice.stopped()) break;
      const std::string more = choice.push(token);
      CHECK(is_whole_utf8(more));
      said += more;
    }
    CHECK(choice.stopped());
    CHECK(said == before);
  }
}

TEST_CASE("what was held back is said at the end, unless it is a stop string") {
  const auto tokenizer = byte_tokenizer(300);
  const auto say = [&](const std::string& text, std::vector<std::string> stop) {
    ChoiceText choice(*tokenizer, -1, std::move(stop));
    std::string said;
    for (const int token : tokenizer->encode_prompt(text)) said += choice.push(token);
    said += choice.finish();
    return Stopped{said, choice.stop_string()};
  };
  CHECK(say("the EN", {"END"}) == Stopped{"the EN", ""});
  CHECK(say("a\xe2\x82", {}) == Stopped{"a\xef\xbf\xbd", ""});
  CHECK(say("a\xe2\x82", {"\xef\xbf\xbd"}) == Stopped{"a", "\xef\xbf\xbd"});
}

TEST_CASE("salts get numbers that no other ever has") {
  Tenants tenants(3);
  CHECK(tenants.number_of("") == 0);
  const auto a = tenants.number_of("a"), b = tenants.number_of("b");
  CHECK(a != 0);
  CHECK(a != b);
  CHECK(tenants.number_of("a") == a);
  std::set<std::uint64_t> seen{0, a, b};
  for (int i = 0; i < 100; ++i) {
    CHECK(seen.insert(tenants.number_of("salt " + std::to_string(i))).second);
    CHECK(tenants.number_of("a") == a);  // used again and again: never forgotten
    CHECK(tenants.size() <= 3);
  }
  CHECK(seen.insert(tenants.number_of("b")).second);  // forgotten, and a new number
}
