#include "ptx/module.hpp"

#include <algorithm>
#include <cctype>

#include "ptx/fault.hpp"
#include "ptx/forms.hpp"

namespace ptxrun {
namespace {

using Texts = std::vector<std::string_view>;

std::string_view trimmed(std::string_view s) {
  const auto begin = s.find_first_not_of(" \t\r");
  return begin == s.npos ? std::string_view{}
                         : s.substr(begin, s.find_last_not_of(" \t\r") - begin + 1);
}

// Parts between any of `separators`, without empty ones.
Texts split(std::string_view s, std::string_view separators) {
  Texts parts;
  for (std::size_t begin = 0, end; (begin = s.find_first_not_of(separators, begin)) != s.npos;
       begin = end) {
    end = std::min(s.find_first_of(separators, begin), s.size());
    parts.push_back(s.substr(begin, end - begin));
  }
  return parts;
}

[[noreturn]] void refuse(const char* what, std::string_view text) {
  throw Fault(std::string(what) + " " + std::string(text));
}

s64 number(std::string_view text) {
  const std::string digits(text);
  std::size_t used = 0;
  s64 value = 0;
  try {
    value = digits[0] == '-' ? std::stoll(digits, &used, 0)
                             : static_cast<s64>(std::stoull(digits, &used, 0));
  } catch (const std::logic_error&) {
    used = 0;
  }
  if (used != digits.size()) refuse("no number:", text);
  return value;
}

// 0: a predicate. Registers of 16 bits have a slot of 32.
u32 slots_of(std::string_view type) {
  if (type == ".pred") return 0;
  if (type == ".b16" || type == ".b32" || type == ".f32") return 1;
  if (type == ".b64") return 2;
  refuse("registers of type", type);
}

u32 bytes_of(std::string_view type) {
  if (type == ".b8" || type == ".u8") return 1;
  if (type == ".u32" || type == ".f32" || type == ".b32") return 4;
  if (type == ".u64" || type == ".b64") return 8;
  refuse("a parameter of type", type);
}

class Reader {
 public:
  std::map<std::string, Entry> read(std::string_view text) {
    int line = 0;
    while (!text.empty()) {
      const auto end = std::min(text.find('\n'), text.size());
      std::string_view s = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      ++line;
      try {
        read_line(trimmed(s.substr(0, s.find("//"))), line);
      } catch (const Fault& fault) {
        throw Fault("PTX, line " + std::to_string(line) + ": " + fault.what());
      }
    }
    return std::move(entries_);
  }

 private:
  struct Bank {
    char kind;  // of operands
    u32 first, slots, count;
  };

  void read_line(std::string_view s, int line) {
    const auto starts = [&](std::string_view what) { return s.substr(0, what.size()) == what; };
    if (s.empty() || s == "(" || s == ")" || s == "{") return;
    if (const auto at = s.find(".entry "); at != s.npos && s[0] == '.')
      return begin(trimmed(s.substr(at + 7)));
    if (starts(".extern .shared")) return (void)(shared_ = split(s, " \t[];").back());
    if (starts(".version") || starts(".target") || starts(".address_size") || starts(".maxntid") ||
        starts(".minnctapersm"))
      return;
    if (entry_ == nullptr) refuse("outside of a kernel:", s);
    if (starts(".param")) return parameter(s);
    if (starts(".reg")) return registers(s);
    if (starts(".pragma")) return;
    if (s[0] == '.') refuse("unknown directive:", s);
    if (s == "}") return end();
    if (s.back() == ':')
      return (void)(labels_[std::string(s.substr(0, s.size() - 1))] =
                        static_cast<int>(entry_->code.size()));
    instruction(s, line);
  }

  void begin(std::string_view s) {
    const std::string name(s.substr(0, s.find_first_of("( ")));
    entry_ = &entries_[name];
    entry_->name = name;
    banks_.clear();
    labels_.clear();
    jumps_.clear();
    literals_.clear();
    params_.clear();
  }

  void end() {
    for (const auto& [index, label] : jumps_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) refuse("no label", label);
      entry_->code[index].target = found->second;
    }
    if (entry_->code.empty() || entry_->code.back().flow != Flow::leave)
      throw Fault("a kernel that does not end with ret");
    entry_ = nullptr;
  }

  void parameter(std::string_view s) {  // .param [.align n] type name[count]
    Texts parts = split(s, " \t[],");
    u32 align = 0, bytes = 1;
    if (parts.size() > 3 && parts[1] == ".align") {
      align = static_cast<u32>(number(parts[2]));
      bytes = parts.size() > 5 ? static_cast<u32>(number(parts[5])) : 1;
      parts.erase(parts.begin() + 1, parts.begin() + 3);
    }
    bytes *= bytes_of(parts.at(1));
    align = std::max(align, bytes_of(parts[1]));
    const std::size_t offset = (entry_->param_bytes + align - 1) / align * align;
    params_[std::string(parts.at(2))] = offset;
    entry_->param_bytes = offset + bytes;
  }

  void registers(std::string_view s) {  // .reg type %name<count>;
    const Texts parts = split(s, " \t<>;");
    if (parts.size() != 4) refuse("registers:", s);
    const u32 slots = slots_of(parts[1]), count = static_cast<u32>(number(parts[3]));
    u32& next = slots == 0 ? entry_->num_predicates : entry_->num_slots;
    const char kind = slots == 0 ? 'P' : parts[1] == ".b16" ? 'H' : slots == 2 ? 'L' : 'R';
    banks_[std::string(parts[2])] = {kind, next, slots, count};
    next += count * std::max(slots, 1u);
  }

  const Bank& bank(std::string_view name, u32& index) const {
    const auto digit = name.find_first_of("0123456789");
    const auto found =
        digit == name.npos ? banks_.end() : banks_.find(std::string(name.substr(0, digit)));
    if (found == banks_.end()) refuse("no register", name);
    index = static_cast<u32>(number(name.substr(digit)));
    if (index >= found->second.count) refuse("no register", name);
    return found->second;
  }

  u32 literal(u64 value, bool wide) {
    const auto [at, fresh] = literals_.try_emplace({value, wide}, entry_->num_slots);
    if (fresh) {
      entry_->num_slots += wide ? 2 : 1;
      entry_->literals.push_back({at->second, value, wide});
    }
    return at->second;
  }

  // Register, literal or symbol of the kind H, R, L or P.
  u32 operand(std::string_view token, char kind) {
    static const std::map<std::string_view, Special> special{
        {"%tid.x", tid_x}, {"%ctaid.x", ctaid_x}, {"%ntid.x", ntid_x}, {"%nctaid.x", nctaid_x}};
    if (const auto found = special.find(token); found != special.end() && kind == 'R') {
      int& slot = entry_->special_slot[found->second];
      if (slot < 0) slot = static_cast<int>(entry_->num_slots++);
      return static_cast<u32>(slot);
    }
    if (token[0] == '%') {
      u32 index = 0;
      const Bank& from = bank(token, index);
      if (from.kind != kind) refuse("of another width than the instruction:", token);
      return from.first + index * std::max(from.slots, 1u);
    }
    if (kind == 'P') return constant_predicate(token);
    const bool wide = kind == 'L';
    if (token.substr(0, 2) == "0f")
      return literal(static_cast<u64>(number("0x" + std::string(token.substr(2)))), wide);
    if (token[0] == '-' || std::isdigit(static_cast<unsigned char>(token[0])) != 0) {
      const auto value = static_cast<u64>(number(token));
      if (kind == 'H')
        return literal((value & 0xffff) * 0x10001, false);  // lanes of 16 bits lie closer
      return literal(wide ? value : value & 0xffffffff, wide);
    }
    if (const auto found = params_.find(std::string(token)); found != params_.end())
      return literal(found->second, wide);
    if (token == shared_ && !wide) return literal(shared_base, false);
    refuse("unknown operand:", token);
  }

  u32 constant_predicate(std::string_view token) {  // false, true, or nobody's
    const u32 predicate = entry_->num_predicates++;
    if (token == "_") return predicate;
    if (token != "0" && token != "1" && token != "-1") refuse("no predicate:", token);
    if (token != "0")
      entry_->true_predicates.push_back(predicate);
    else
      entry_->false_predicates.push_back(predicate);
    return predicate;
  }

  void instruction(std::string_view s, int line) {
    Instruction made;
    made.line = line;
    if (s[0] == '@') {
      const auto end = s.find_first_of(" \t");
      made.negated = s.size() > 1 && s[1] == '!';
      made.guard = static_cast<int>(
          operand(s.substr(made.negated ? 2 : 1, end - (made.negated ? 2 : 1)), 'P'));
      s = trimmed(s.substr(end));
    }
    const std::string name(s.substr(0, s.find_first_of(" \t;")));
    const Texts tokens = split(s.substr(name.size()), ", \t{}|;");
    char width = 0;  // of the first register that is not part of an address
    for (const std::string_view token : tokens) {
      u32 index = 0;
      if (token[0] != '%' || token.find('.') != token.npos) continue;
      width = bank(token, index).kind;
      break;
    }
    made.form = find_form(name, width);
    if (made.form == nullptr) refuse("unknown instruction:", name);
    made.run = made.form->run;
    made.flow = made.form->flow;
    const std::string& kinds = made.form->operands;
    if (tokens.size() != kinds.size()) refuse("not the operands of", name);
    if (const auto v = name.find(".v"); v != name.npos)
      made.vector = static_cast<u8>(name[v + 2] - '0');
    for (std::size_t k = 0; k < kinds.size(); ++k) {
      std::string_view token = tokens[k];
      if (kinds[k] == 'T') {
        jumps_.emplace_back(entry_->code.size(), std::string(token));
      } else if (kinds[k] == 'I') {
        made.operand[k] = static_cast<u32>(number(token));
      } else if (kinds[k] == 'A' || kinds[k] == 'S') {
        if (token.front() != '[' || token.back() != ']') refuse("no address:", token);
        const Texts parts = split(token.substr(1, token.size() - 2), "+");
        if (parts.size() > 1) made.offset += number(parts[1]);
        made.operand[k] = operand(parts.at(0), kinds[k] == 'A' ? 'L' : 'R');
      } else {
        made.operand[k] = operand(token, kinds[k]);
      }
    }
    if (made.flow == Flow::barrier && made.operand[0] != 0) throw Fault("barriers other than 0");
    if (kinds.substr(0, 2) == "SA" && made.offset != 0) throw Fault("offsets of a copy");
    entry_->code.push_back(made);
  }

  std::map<std::string, Entry> entries_;
  std::string shared_;  // the symbol of dynamic shared memory
  // Of the kernel at hand:
  Entry* entry_ = nullptr;
  std::map<std::string, Bank> banks_;
  std::map<std::string, int> labels_;
  std::vector<std::pair<std::size_t, std::string>> jumps_;
  std::map<std::pair<u64, bool>, u32> literals_;
  std::map<std::string, std::size_t> params_;
};

}  // namespace

std::map<std::string, Entry> read_module(std::string_view text) {
  return Reader().read(text);
}

}  // namespace ptxrun
