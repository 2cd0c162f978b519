// A game in C++ joins a run of Shoal: the run's policy acts in it, and learns from its rewards. One header, C++17, no
// package. docs/games/cpp.md is its page, docs/protocol.md its protocol. One thread at a time uses a Run.
#pragma once
#ifdef _WIN32
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <winsock2.h>
#include <ws2tcpip.h>
#else
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#endif
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace shoal {

constexpr size_t max_received_bytes = size_t(64) << 20;  // of one message

/// `code` is one of docs/protocol.md (`bad_token`, `invalid`, ...), or of this client: `unreachable`, `rejected` (by
/// HTTP), `malformed` (bytes that are no answer), `timeout`, `busy`, `no_tls`. Thrown where exceptions are enabled.
struct Error : std::runtime_error {
  explicit Error(std::string name = "", const std::string& problem = "", int of_agent = -1)
      : std::runtime_error(name.empty() ? problem : name + ": " + problem), code(std::move(name)), agent(of_agent) {}
  std::string code;
  int agent;  // that it is about; -1: none
};

/// A value of JSON, in whatever locale. What is not there is Null, with the number 0.
struct Json {
  enum Kind { Null, Bool, Number, String, Array, Object } kind = Null;
  double number = 0;  // of a Bool: 0 or 1
  std::string text;
  std::vector<Json> items;
  std::vector<std::string> names;  // of an Object's items

  const Json& operator[](const char* name) const {
    static const Json none;
    auto at = std::find(names.begin(), names.end(), name);
    return at == names.end() ? none : items[size_t(at - names.begin())];
  }
  int64_t integer(int64_t otherwise = -1) const {
    return kind == Number && std::abs(number) < 9e15 ? int64_t(number) : otherwise;
  }

  /// False for a text that is not one value.
  bool parse(const std::string& from) {
    const char *at = from.data(), *end = at + from.size();
    return read(at, end, 0) && (skip(at, end), at == end);
  }
  static std::string quote(const std::string& text) {
    std::string quoted = "\"";
    char escape[8];
    for (unsigned char each : text) {
      std::snprintf(escape, sizeof escape, each < 32 || each == '"' || each == '\\' ? "\\u%04x" : "%c", each);
      quoted += escape;
    }
    return quoted + '"';
  }
  static std::string format(double value) {
    char digits[32];
    std::snprintf(digits, sizeof digits, std::abs(value) < 9e15 && value == std::floor(value) ? "%.0f" : "%.9g", value);
    std::replace(digits, digits + std::strlen(digits), ',', '.');
    return digits;
  }

 private:
  using At = const char*;
  static void skip(At& at, At end) {
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')) at++;
  }
  static bool is_digit(At at, At end) { return at < end && *at >= '0' && *at <= '9'; }
  static bool take(At& at, At end, const char* word) {
    size_t size = std::strlen(word);
    return size_t(end - at) >= size && !std::memcmp(at, word, size) && (at += size, true);
  }
  bool read(At& at, At end, int depth) {
    skip(at, end);
    if (depth > 64 || at == end) return false;
    if (*at == '"') return kind = String, read_text(at, end, text);
    if (take(at, end, "{")) return kind = Object, read_items(at, end, depth, "}");
    if (take(at, end, "[")) return kind = Array, read_items(at, end, depth, "]");
    if (take(at, end, "null")) return true;
    kind = Bool, number = take(at, end, "true");
    if (number > 0 || take(at, end, "false")) return true;
    return kind = Number, read_number(at, end);
  }
  bool read_items(At& at, At end, int depth, const char* closing) {
    if (skip(at, end), take(at, end, closing)) return true;
    do {
      if (kind == Object && (skip(at, end), !read_text(at, end, names.emplace_back()))) return false;
      if (kind == Object && (skip(at, end), !take(at, end, ":"))) return false;
      if (!items.emplace_back().read(at, end, depth + 1)) return false;
    } while (skip(at, end), take(at, end, ","));
    return take(at, end, closing);
  }
  bool read_number(At& at, At end) {
    bool is_negative = take(at, end, "-"), is_number = is_digit(at, end), is_small = false;
    int exponent = 0, written = 0;
    while (is_digit(at, end)) number = number * 10 + (*at++ - '0');
    if (take(at, end, "."))
      for (; is_digit(at, end); exponent--) number = number * 10 + (*at++ - '0');
    if (take(at, end, "e") || take(at, end, "E")) {
      if (!take(at, end, "+")) is_small = take(at, end, "-");
      while (is_digit(at, end)) written = std::min(written * 10 + (*at++ - '0'), 999);
    }
    number *= std::pow(10.0, exponent + (is_small ? -written : written)) * (is_negative ? -1 : 1);
    return is_number && std::isfinite(number);
  }
  static bool read_text(At& at, At end, std::string& into) {
    if (!take(at, end, "\"")) return false;
    while (at < end && *at != '"') {
      if (*at != '\\') { into += *at++; continue; }
      if (end - at < 2) return false;
      const char *escapes = "b\bf\fn\nr\rt\t", *plain = std::strchr(escapes, at[1]);
      if (at[1] == 'u') {
        unsigned long code = end - at < 6 ? 0 : std::strtoul(std::string(at + 2, 4).c_str(), nullptr, 16);
        if (code >= 0x800) into += {char(0xe0 | code >> 12), char(0x80 | (code >> 6 & 0x3f))};
        else if (code >= 0x80) into += char(0xc0 | code >> 6);
        into += char(code < 0x80 ? code : 0x80 | (code & 0x3f));
      } else into += plain && at[1] ? plain[1] : at[1];
      at += std::min<ptrdiff_t>(end - at, at[1] == 'u' ? 6 : 2);
    }
    return take(at, end, "\"");
  }
};

/// The numbers of an observation, a mask or an action.
struct Tensor : std::vector<double> {
  Tensor() = default;
  template <class T> Tensor(const T* values, size_t count) : vector(values, values + count) {}
  template <class T> Tensor(std::initializer_list<T> values) : vector(values.begin(), values.end()) {}
  template <class T> Tensor(const std::vector<T>& values) : vector(values.begin(), values.end()) {}
  template <class T, size_t N> Tensor(const T (&values)[N]) : vector(values, values + N) {}
};

/// How numbers of one dtype are written and read. This client has no float16.
struct Dtype {
  size_t size;
  size_t (*put)(const Tensor& values, std::string& bytes);  // returns how many it has put: up to one that is none of this dtype
  double (*get)(const char* bytes);

  template <class T> static Dtype of() {
    return {sizeof(T), [](const Tensor& values, std::string& bytes) {
      for (size_t i = 0; i < values.size(); i++) {
        bool fits = values[i] == std::floor(values[i]) && values[i] >= double(std::numeric_limits<T>::lowest()) &&
                    values[i] < std::ldexp(1.0, std::numeric_limits<T>::digits);
        if (std::is_integral<T>::value && !fits) return i;
        T value = T(values[i]);
        bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
      }
      return values.size();
    }, [](const char* bytes) { T value; return std::memcpy(&value, bytes, sizeof value), double(value); }};
  }
  /// Null for a name that is none. A bool is a byte.
  static const Dtype* find(const std::string& name) {
    static const std::map<std::string, Dtype> all = {
        {"float32", of<float>()}, {"float64", of<double>()}, {"bool", of<uint8_t>()}, {"int8", of<int8_t>()},
        {"int16", of<int16_t>()}, {"int32", of<int32_t>()}, {"int64", of<int64_t>()}, {"uint8", of<uint8_t>()},
        {"uint16", of<uint16_t>()}, {"uint32", of<uint32_t>()}, {"uint64", of<uint64_t>()}};
    auto at = all.find(name);
    return at == all.end() ? nullptr : &at->second;
  }
};

/// A connection that carries binary WebSocket messages. Write one for the sockets of an engine, or for TLS. None of the
/// three functions waits; the destructor ends the connection.
class Transport {
 public:
  enum State { Opening, Open, Message, Lost };
  virtual ~Transport() = default;
  virtual void open(const std::string& address) = 0;  // begins one, in place of that before
  virtual void send(const std::string& message) = 0;
  virtual State poll(std::string& message) = 0;       // Message: one has come
  virtual void wait(int) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }  // until one may have come
  Error lost;                                         // why it was lost; with a code, if another attempt is useless
};

/// The sockets of this system: `ws://` alone. The system may wait where a host has a name that it does not know.
class SocketTransport : public Transport {
 public:
  ~SocketTransport() override {
    if (phase_ == Ready) frame(8, "\x03\xe8"), flush();  // 1000
    drop();
    if (found_) freeaddrinfo(found_);
  }
  void open(const std::string& address) override {
    drop(), lost = Error(), in_.clear(), out_.clear(), part_.clear(), is_part_ = false;
    if (found_) freeaddrinfo(found_), found_ = nullptr;
    size_t slash = std::min(address.find('/', 5), address.size()), colon = address.rfind(':', slash);
    if (address.compare(0, 5, "ws://") || colon < 5) return void(lose("no_tls", address + " is no ws://HOST:PORT"));
    std::string host = address.substr(5, colon - 5), port = address.substr(colon + 1, slash - colon - 1);
    out_ = "GET " + (slash < address.size() ? address.substr(slash) : "/") + " HTTP/1.1\r\nHost: " + host + ":" + port +
           "\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
           "Sec-WebSocket-Key: YSBnYW1lIGZvciBzaG9hbA==\r\n\r\n";
    if (host[0] == '[') host = host.substr(1, host.size() - 2);
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    start();
    getaddrinfo(host.c_str(), port.c_str(), &hints, &found_), next_ = found_, connect_next();
  }
  void send(const std::string& message) override { frame(2, message), flush(); }
  State poll(std::string& message) override {
    if (phase_ == Connecting && wait_for(0)) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(socket_, SOL_SOCKET, SO_ERROR, reinterpret_cast<char*>(&error), &size);
      if (error) connect_next();
      else phase_ = Upgrading;
    }
    if (phase_ >= Upgrading) flush();
    for (int reads = 0; phase_ >= Upgrading && reads < 64; reads++) {
      if (phase_ == Upgrading) upgrade();
      if (phase_ == Ready && read_message(message)) return Message;
      if (phase_ < Upgrading) break;
      static thread_local char buffer[1 << 16];
      auto count = ::recv(socket_, buffer, sizeof buffer, 0);
      if (count > 0) in_.append(buffer, size_t(count));
      else if (count < 0 && would_wait()) break;
      else lose("", "the connection broke");
    }
    return phase_ == Closed ? Lost : phase_ == Ready ? Open : Opening;
  }
  void wait(int milliseconds) override { phase_ == Closed ? Transport::wait(1) : void(wait_for(milliseconds)); }

 private:
#ifdef _WIN32
  using Socket = SOCKET;
  using Polled = WSAPOLLFD;
  using Size = int;
  static constexpr int no_signal = 0;
  static void start() { WSADATA data; static int started = WSAStartup(MAKEWORD(2, 2), &data); (void)started; }
  static bool would_wait() { return WSAGetLastError() == WSAEWOULDBLOCK; }
  static void set_non_blocking(Socket socket) { u_long on = 1; ioctlsocket(socket, FIONBIO, &on); }
  static int poll_one(Polled* each, int milliseconds) { return WSAPoll(each, 1, milliseconds); }
  static void close(Socket socket) { closesocket(socket); }
#else
  using Socket = int;
  using Polled = pollfd;
  using Size = size_t;
#ifdef MSG_NOSIGNAL
  static constexpr int no_signal = MSG_NOSIGNAL;
#else
  static constexpr int no_signal = 0;  // macOS: the game ignores SIGPIPE
#endif
  static void start() {}
  static bool would_wait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINPROGRESS || errno == EINTR; }
  static void set_non_blocking(Socket socket) { fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK); }
  static int poll_one(Polled* each, int milliseconds) { return ::poll(each, 1, milliseconds); }
  static void close(Socket socket) { ::close(socket); }
#endif
  enum Phase { Closed, Connecting, Upgrading, Ready };

  void connect_next() {
    for (drop(); next_; drop()) {
      addrinfo* to = std::exchange(next_, next_->ai_next);
      socket_ = ::socket(to->ai_family, to->ai_socktype, to->ai_protocol);
      if (socket_ == Socket(-1)) continue;
      int one = 1;
      set_non_blocking(socket_), phase_ = Connecting;
      setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, reinterpret_cast<const char*>(&one), sizeof one);
      if (!::connect(socket_, to->ai_addr, Size(to->ai_addrlen)) || would_wait()) return;
    }
    lose("", "nothing listens there");
  }
  void drop() {
    if (phase_ != Closed) close(socket_);
    phase_ = Closed;
  }
  bool lose(const char* code, const std::string& problem) {
    if (lost.code.empty()) lost = Error(code, problem);
    return drop(), false;
  }
  bool wait_for(int milliseconds) {
    Polled each{};
    each.fd = socket_, each.events = short(POLLIN | (phase_ == Connecting || !out_.empty() ? POLLOUT : 0));
    return poll_one(&each, milliseconds) > 0;
  }
  void flush() {
    for (;;) {
      auto count = out_.empty() ? 0 : ::send(socket_, out_.data(), Size(out_.size()), no_signal);
      if (count <= 0) return;  // a loss shows at the next read
      out_.erase(0, size_t(count));
    }
  }
  void frame(int opcode, const std::string& body) {
    size_t size = body.size(), bytes = size < 126 ? 0 : size < 65536 ? 2 : 8;
    out_ += {char(0x80 | opcode), char(0x80 | (bytes == 0 ? size : bytes == 2 ? 126 : 127))};
    while (bytes--) out_ += char(uint64_t(size) >> 8 * bytes);
    uint32_t mask = uint32_t(random_());
    for (int i = 0; i < 4; i++) out_ += char(mask >> 8 * i);
    for (size_t i = 0; i < size; i++) out_ += char(uint8_t(body[i]) ^ (mask >> 8 * (i & 3)));
  }
  void upgrade() {
    size_t end = in_.find("\r\n\r\n");
    if (std::string("HTTP/1.").compare(0, in_.size(), in_, 0, 7) || in_.size() > 65536)
      return void(lose("malformed", "the server does not speak HTTP"));
    if (end == std::string::npos) return;
    if (in_.compare(9, 3, "101"))  // its text follows, and then the server closes
      lost = Error(in_[9] == '4' ? "rejected" : "", in_.substr(9, in_.find('\r') - 9) + ": " + in_.substr(end + 4));
    else if (in_.find("R4cAC4Jwn/jAGjDVdiiUZtCM9sM=") > end)  // of the key: both are constant, since nothing is cached
      lose("malformed", "the server does not speak WebSocket");
    else
      in_.erase(0, end + 4), phase_ = Ready;
  }
  bool read_message(std::string& message) {
    size_t at = 0;
    for (bool is_whole = false; !is_whole && in_.size() >= at + 2;) {
      auto byte = [&](size_t i) { return uint64_t(uint8_t(in_[at + i])); };
      uint64_t opcode = byte(0) & 15, size = byte(1), head = size == 126 ? 4 : size == 127 ? 10 : 2;
      if (in_.size() < at + head) break;
      if (head > 2) size = 0;
      for (size_t i = 2; i < head; i++) size = size << 8 | byte(i);
      bool is_control = opcode > 7, is_last = byte(0) & 0x80;
      bool is_kind = opcode < 3 || (is_control && opcode < 11 && head == 2 && is_last);
      bool is_in_order = is_control || is_part_ == (opcode == 0);
      if (!is_kind || !is_in_order || (byte(0) & 0x70) || byte(1) > 127 || size > max_received_bytes - part_.size())
        return lose("malformed", "the server sent what is no frame of WebSocket");
      if (in_.size() < at + head + size) break;
      std::string body = in_.substr(at + head, size);
      at += head + size;
      if (opcode == 9) frame(10, body), flush();
      if (opcode == 8) {
        int code = size < 2 ? 1005 : uint8_t(body[0]) << 8 | uint8_t(body[1]);
        return lose(code == 1009 ? "too_large" : "", "closed, " + std::to_string(code) + " " + body.erase(0, 2));
      }
      if (!is_control) part_ += body, is_part_ = !is_last, is_whole = is_last;
      if (is_whole) message.swap(part_), part_.clear(), in_.erase(0, at);
      if (is_whole) return true;
    }
    return in_.erase(0, at), false;
  }

  Phase phase_ = Closed;
  Socket socket_ = Socket(-1);
  addrinfo *found_ = nullptr, *next_ = nullptr;  // what the host's name stands for
  std::string in_, out_, part_;                  // bytes that came, bytes to send, frames of a message that came
  bool is_part_ = false;
  std::random_device random_;
};

/// The answer to an observation. A Discrete action is an int.
struct Action {
  std::vector<double> values{0};  // in C order
  int64_t version = 0;            // of the weights that chose it
  operator int() const { return int(values[0]); }
};

/// How an episode ended; of a game that has a goal, with Failed or Succeeded: `Terminated | Succeeded`.
enum End { Terminated = 1, Truncated = 2, Failed = 4, Succeeded = 12 };

struct Options {
  double wait_s = 300;       // the longest that `act` and `wait` take
  double give_up_s = 0;      // without a gateway; 0: 60 s before the first session, 300 s after one
  std::string behaviour;     // who acts, as "human"; empty: the run's policy
  std::string offers;        // the spaces of this game as JSON: {"observation": [4], "action": 3}; an action of numbers
                             // and choices is [{"low": -1, "high": 1}, 2]
  std::function<void(const Json& values)> on_settings = nullptr;  // within `poll` and `act`: at first, and on change
  std::unique_ptr<Transport> transport = nullptr;                 // empty: a SocketTransport
  std::string replay;  // in place of a run: a file of `shoal episodes RUN --export NAME`, whose actions one agent plays
};

/// A game's part in a run. Its agents have numbers of the game's choice. It connects within `poll`, `wait` and `act`,
/// again whenever that is needed: then what is unanswered is sent again. Each of these waits as long as it says.
class Run {
 public:
  Run(std::vector<std::string> addresses, std::string token, std::string actor_id, Options options = {})
      : addresses_(std::move(addresses)), token_(std::move(token)), actor_id_(std::move(actor_id)),
        options_(std::move(options)) {
    if (Json offers; offers.parse(options_.offers) && offers["action"].kind == Json::Array)
      for (auto& each : offers["action"].items) choices_.push_back(each.number);  // of a map, which are numbers, 0
    if (std::find(choices_.begin(), choices_.end(), 0) == choices_.end()) choices_.clear();
    if (!options_.transport) options_.transport = std::make_unique<SocketTransport>();
    auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
    incarnation_ = std::chrono::duration_cast<std::chrono::milliseconds>(since_1970).count();
  }
  ~Run() { leave(); }

  /// Wait for the run's welcome, at most `wait_s`: for a game whose first episode needs the settings.
  void connect() { wait_until([&] { return is_connected(); }); }
  /// The next action of an agent; its first observation begins an episode. `reward` is that of the action before.
  /// Waits for the answer, at most `wait_s`. When the run ends meanwhile, `is_over` says so, and the action is 0.
  Action act(int agent, const Tensor& observation, float reward = 0, const Tensor& mask = {}) {
    ask(agent, observation, reward, mask);
    wait_until([&] { return !is_waiting(agent); });
    return action(agent);
  }
  /// The same without waiting: `poll` sends it, together with those of other agents. Afterwards the agent waits.
  void ask(int agent, const Tensor& observation, float reward = 0, const Tensor& mask = {}) {
    put(agent, observation, reward, 0, mask);
  }
  /// End an agent's episode with its last observation. It is sent as by `ask`, and the agent may ask at once for another.
  void end(int agent, const Tensor& observation, float reward = 0, int how = Terminated, const Tensor& mask = {}) {
    put(agent, observation, reward, how, mask);
  }
  /// The action that a person took in place of the newest answer, before the next `ask` or `end` of this agent.
  void take_over(int agent, Tensor taken) {
    for (size_t i = 0; i < choices_.size() && i < taken.size(); i++) taken[i] += choices_[i] > 0 ? 0.5 : 0;
    agents_[agent].taken = std::move(taken);
  }
  /// Send what was asked, receive, reconnect; never waits. True when nothing is unanswered.
  bool poll() { return step(), report(), waiting_ == 0; }
  /// Wait until everything is answered, also ends, at most `wait_s`.
  void wait() { wait_until([&] { return waiting_ == 0; }); }
  /// Whether the agent's action has not come yet.
  bool is_waiting(int agent) const {
    auto at = agents_.find(agent);
    auto open = at == agents_.end() ? episodes_.end() : episodes_.find(at->second.episode);
    return open != episodes_.end() && open->second.waits;
  }
  /// The newest answer.
  const Action& action(int agent) { return agents_[agent].action; }
  /// Whether the run has ended, this game has left it, or an error was fatal.
  bool is_over() const { return phase_ == Over; }
  bool is_connected() const { return phase_ == Joined; }
  /// The oldest error that was not thrown, as where exceptions are disabled; without one its code is empty.
  Error error() {
    if (errors_.empty()) return fatal_;
    Error oldest = errors_.front();
    return errors_.erase(errors_.begin()), oldest;
  }
  /// Send the ends of episodes, which takes a second at most, and say goodbye. Open episodes are not counted.
  void leave() {
    auto is_ending = [](auto& each) { return each.second.waits && each.second.flags & 3; };
    auto are_ending = [&] { return std::any_of(episodes_.begin(), episodes_.end(), is_ending); };
    for (double last = now() + 1; !is_over() && are_ending() && now() < last; step()) options_.transport->wait(20);
    if (phase_ == Joined && options_.replay.empty()) send("{\"kind\":\"bye\"}");
    finish();
  }
  Json settings, welcome;  // the run's newest, and the gateway's
  int64_t diverged_at = -1;  // the first step of a replay whose observation is not the recorded one

 private:
  enum Phase { Away, Joining, Joined, Over };
  static constexpr size_t max_rows = 1024;  // of a message
  struct Form {
    size_t count = 1;
    const Dtype* dtype = nullptr;
    std::string name;  // of the dtype
    bool is_scalar = true;
    bool read(const Json& tensor) {
      count = 1, name = tensor["dtype"].text, dtype = Dtype::find(name), is_scalar = tensor["shape"].items.empty();
      for (auto& each : tensor["shape"].items) count *= each.number >= 1 && each.number < 1e6 ? size_t(each.number) : 0;
      return dtype && count > 0 && count < max_received_bytes;
    }
  };
  struct Agent {
    int64_t episode = -1;  // -1: none is open
    Tensor taken;          // before its next step
    Action action;
  };
  struct Episode {
    int agent = -1;
    int64_t step = 0, settings = 0;  // the version that it began with
    double total = 0;                // the return, with `reward`
    float reward = 0;
    int flags = 0;
    bool waits = false, is_sent = false, is_assisted = false;  // a person has acted in it
    Tensor observation, mask, taken;
  };
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  void put(int number, const Tensor& observation, float reward, int flags, const Tensor& mask) {
    Agent& agent = agents_[number];
    auto at = episodes_.find(agent.episode);
    bool is_open = at != episodes_.end();
    if (is_over()) return report();
    if (is_open && at->second.waits) return raise(Error("busy", "the agent waits for an answer", number));
    std::string problem = find_infinite("observation", number, observation), of_reward = find_infinite("reward", number, {reward});
    if (problem.empty()) problem = of_reward;
    if (problem.empty() && is_open) problem = find_infinite("taken", number, agent.taken);
    if (!problem.empty()) return raise(Error("invalid", problem, number));
    if (!is_open && flags) return raise(Error("invalid", "the agent has no episode to end", number));
    Episode& each = is_open ? at->second : episodes_[agent.episode = next_episode_++];
    if (is_open) {
      each.step++, each.reward = reward, each.total += reward;
      each.taken.swap(agent.taken), each.is_assisted |= !each.taken.empty();
    } else each.agent = number, each.settings = settings_version_;
    each.observation = observation, each.mask = mask, each.flags = flags, each.waits = true, each.is_sent = false;
    agent.taken.clear(), waiting_++;
    if (flags & 3) agent.episode = -1;
  }
  static std::string describe(const std::string& field, int agent, const std::string& problem) {
    return field + " of agent " + std::to_string(agent) + ": " + problem;
  }
  /// The first number that is not finite in float32, in which the learner computes, or "".
  static std::string find_infinite(const std::string& field, int agent, const Tensor& values) {
    auto is_infinite = [](double each) { return !(std::abs(each) <= double(std::numeric_limits<float>::max())); };
    auto at = std::find_if(values.begin(), values.end(), is_infinite);
    if (at == values.end()) return "";
    std::string index = field == "reward" ? "" : "[" + std::to_string(at - values.begin()) + "]";
    return describe(field + index, agent, std::isnan(*at) ? "NaN" : "infinite in float32");
  }
  /// Go on with an episode that the gateway has not, under another number.
  void renew(int64_t number) {
    auto open = episodes_.extract(number);
    Episode& each = open.mapped();
    each.step = 0, each.reward = float(each.total), each.is_sent = false;
    each.taken.assign(each.is_assisted ? action_.count : 0, 0);
    open.key() = agents_[each.agent].episode = next_episode_++;
    episodes_.insert(std::move(open));
  }
  void release(int64_t number, bool is_open) {
    Episode& each = episodes_[number];
    waiting_ -= each.waits, each.waits = false, each.taken.clear();
    if (is_open) return;
    if (agents_[each.agent].episode == number) agents_[each.agent].episode = -1;
    episodes_.erase(number);
  }
  void refuse(int64_t number, const std::string& reason, const std::string& detail) {
    Episode& each = episodes_[number];
    int64_t& newest = agents_[each.agent].episode;
    bool is_lost = reason == "unknown_episode" || reason == "ended_episode" || reason == "failed";
    if (is_lost && !(each.flags & 3)) return renew(number);
    if (!is_lost) errors_.emplace_back(reason, detail, each.agent);
    bool is_open = reason == "invalid" && each.step > 0 && (newest == number || newest < 0);
    if (is_open) each.step--, each.total -= each.reward, newest = number;  // it may be asked once more
    release(number, is_open);
  }

  template <class F> void wait_until(F is_done) {
    double deadline = now() + options_.wait_s;
    for (step(); !is_over() && errors_.empty() && !is_done(); step()) {
      double left = deadline - now();
      if (left <= 0) errors_.emplace_back("timeout", "no answer for " + Json::format(options_.wait_s) + " s");
      else options_.transport->wait(int(1000 * std::min(left, 0.02)) + 1);
    }
    report();
  }
  void report() {
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
    Error oldest = error();
    if (!oldest.code.empty()) throw oldest;
#endif
  }
  void raise(Error error) { errors_.push_back(std::move(error)), report(); }
  void finish(Error error = Error()) {
    if (!is_over()) fatal_ = std::move(error);
    phase_ = Over, waiting_ = 0, options_.transport.reset();
    episodes_.clear();
    for (auto& each : agents_) each.second.action.values.assign(action_.count, 0);
  }

  void step() {
    if (is_over()) return;
    if (!options_.replay.empty()) return replay();
    double time = now(), pause = std::max(0.0, time - stepped_at_ - 1);  // the game did not poll for so long
    if (stepped_at_ == 0) pause = 0, since_ = time;
    stepped_at_ = time, since_ += pause, heard_at_ += pause;
    if (phase_ == Away) {
      double limit = options_.give_up_s > 0 ? options_.give_up_s : was_answered_ ? 300 : 60;
      std::string problem = "no gateway for " + Json::format(limit) + " s: " + why_;
      if (time - since_ > limit) return finish(Error("unreachable", problem));
      if (time < try_at_) return;
      phase_ = Joining, has_greeted_ = false, deadline_ = time + 2;
      options_.transport->open(addresses_[address_]);
    }
    std::string message;
    Transport::State state = options_.transport->poll(message);
    for (int i = 0; state == Transport::Message && i < 10000; i++) {
      heard_at_ = time, take(message);
      if (phase_ < Joining || phase_ == Over) return;
      state = options_.transport->poll(message);
    }
    if (state == Transport::Lost) return lose(options_.transport->lost);
    if (phase_ == Joining && state == Transport::Open && !has_greeted_) greet(), deadline_ = time + 2;
    if (phase_ == Joining && time > deadline_)
      return lose(Error(options_.transport->lost.code, "no welcome within 2 s"));
    if (phase_ != Joined) return;
    flush(time);
    double silence = waiting_ ? time - std::max(heard_at_, asked_at_) : 0;
    if (silence > timeout_s_) return lose(Error("", "silent for " + Json::format(timeout_s_) + " s"));
    if (silence > heartbeat_s_ && time - pinged_at_ > heartbeat_s_) pinged_at_ = time, send("{\"kind\":\"ping\"}");
  }
  /// Connect again: to the same address after a session, then to the next ones.
  void lose(const Error& error) {
    if (!error.code.empty() && addresses_.size() == 1) return finish(error);
    why_ = addresses_[address_] + ": " + error.what(), since_ = phase_ == Joined ? now() : since_;
    if (phase_ == Joining) address_ = (address_ + 1) % addresses_.size();
    try_at_ = now() + (attempts_ ? std::min(1.0, 0.05 * std::pow(2.0, attempts_ - 1)) : 0), attempts_ += attempts_ < 9;
    phase_ = Away;
  }
  void greet() {
    has_greeted_ = true;
    std::string hello = "{\"kind\":\"hello\",\"protocol\":1,\"inference\":\"remote\",\"client\":\"c++\"";
    hello += ",\"token\":" + Json::quote(token_) + ",\"actor_id\":" + Json::quote(actor_id_);
    hello += ",\"incarnation\":" + std::to_string(incarnation_);
    if (!run_id_.empty()) hello += ",\"run_id\":" + Json::quote(run_id_);
    if (!options_.offers.empty()) hello += ",\"offers\":" + options_.offers;
    if (!options_.behaviour.empty()) hello += ",\"behaviour\":" + Json::quote(options_.behaviour);
    send(hello + "}");
  }
  void send(const std::string& header, const std::vector<std::string>& frames = {}) {
    std::string message;
    auto add = [&](const std::string& frame) {
      for (int i = 0; i < 4; i++) message += char(frame.size() >> 8 * i);
      message += frame;
    };
    add(header);
    for (auto& each : frames) add(each);
    options_.transport->send(message);
  }

  /// Send what is unsent: one agent's as `act`, those of several as rows of `acts`.
  void flush(double time) {
    std::vector<int64_t> unsent;
    for (auto& [number, each] : episodes_)
      if (each.waits && !each.is_sent) unsent.push_back(number);
    if (unsent.empty()) return;
    asked_at_ = time;
    std::vector<std::string> frames(num_choices_ ? 2 : 1), rows;
    std::string episodes, steps, settings_of;
    size_t count = 0;
    auto send_rows = [&] {
      std::string header = "{\"kind\":\"acts\",\"episodes\":[" + episodes + "],\"steps\":[" + steps + "]";
      if (count) send(header + (settings_version_ ? ",\"settings\":[" + settings_of + "]}" : "}"), rows);
      episodes.clear(), steps.clear(), settings_of.clear(), rows.assign(num_choices_ ? 4 : 3, ""), count = 0;
    };
    send_rows();
    for (int64_t number : unsent) {
      Episode& each = episodes_[number];
      std::string problem = pack(each, frames);
      if (!problem.empty()) {
        refuse(number, "invalid", problem);
        continue;
      }
      each.is_sent = true;
      if (!has_rows_ || unsent.size() == 1 || !each.taken.empty()) {
        send(describe(number, each), frames);
        continue;
      }
      episodes += (count ? "," : "") + std::to_string(number);
      steps += (count ? "," : "") + std::to_string(each.step);
      settings_of += (count ? "," : "") + std::to_string(each.step ? 0 : each.settings);
      rows[0] += frames[0], rows[1].append(reinterpret_cast<const char*>(&each.reward), 4), rows[2] += char(each.flags);
      if (num_choices_) rows[3] += frames[1];
      if (++count == max_rows) send_rows();
    }
    send_rows();
  }
  /// The frames of an observation and its mask. Returns what is wrong with them, or "".
  std::string pack(const Episode& each, std::vector<std::string>& frames) {
    frames.assign(frames.size(), "");
    std::string problem = put("observation", each.agent, each.observation, observation_, frames[0]);
    if (!num_choices_ || !problem.empty()) return problem;
    if (each.mask.empty() && each.flags & Terminated) return frames[1].assign(num_choices_, 1), "";
    Form form{num_choices_, Dtype::find("bool"), "bool", false};
    return put("mask", each.agent, each.mask, form, frames[1]);
  }
  static std::string put(const char* field, int agent, const Tensor& values, const Form& form, std::string& bytes) {
    size_t size = values.size(), at = size == form.count ? form.dtype->put(values, bytes) : 0;
    if (size != form.count)
      return describe(field, agent, std::to_string(size) + " numbers, expected " + std::to_string(form.count));
    if (at == size) return "";
    return describe(field + ("[" + std::to_string(at)) + "]", agent, Json::format(values[at]) + " is no " + form.name);
  }
  std::string describe(int64_t number, const Episode& each) {
    std::string header = "{\"kind\":\"act\",\"episode\":" + std::to_string(number) +
                         ",\"step\":" + std::to_string(each.step) + ",\"reward\":" + Json::format(each.reward), taken;
    if (each.flags & 3) header += each.flags & Terminated ? ",\"terminated\":true" : ",\"truncated\":true";
    if (each.flags & Failed) header += each.flags & 8 ? ",\"success\":true" : ",\"success\":false";
    if (!each.step && each.settings) header += ",\"settings\":" + std::to_string(each.settings);
    for (double value : each.taken) taken += (taken.empty() ? "" : ",") + Json::format(value);
    if (!taken.empty()) header += ",\"taken\":" + (action_.is_scalar ? taken : "[" + taken + "]");
    return header + "}";
  }

  void take(const std::string& message) {
    std::vector<std::string> frames;
    Json header;
    for (size_t at = 0, size = 0; at < message.size(); at += size) {
      size = 0;
      for (size_t i = 0; i < 4 && at + i < message.size(); i++) size |= size_t(uint8_t(message[at + i])) << 8 * i;
      if ((at += 4) > message.size() || size > message.size() - at) return reject("a frame that is cut off");
      frames.push_back(message.substr(at, size));
    }
    if (frames.empty() || !header.parse(frames[0])) return reject("a header that is no JSON");
    const std::string &kind = header["kind"].text, &code = header["code"].text;
    was_answered_ |= kind == "welcome" || kind == "bye";
    if (kind == "welcome") return join(header);
    if (kind == "error" && code == "hello_required") return lose(Error("", header["message"].text));
    if (kind == "error" && code == "unknown_kind" && phase_ == Joined) return has_rows_ = false, resend();
    if (kind == "error" && (header["fatal"].number || phase_ == Joining || code == "malformed" || code == "too_large"))
      return finish(Error(code, header["message"].text));
    if (kind == "bye") return header["finished"].number ? finish() : lose(Error("", header["reason"].text));
    if (phase_ != Joined) return;
    if (kind == "action" || kind == "actions") attempts_ = 0;
    if (kind == "action") take_action(header);
    if (kind == "actions") take_actions(header, frames);
    if (kind == "settings") apply(header["version"].integer(0), header["values"]);
    if (kind == "ping") send("{\"kind\":\"pong\",\"nonce\":" + Json::format(header["nonce"].number) + "}");
  }
  void reject(const std::string& what) { finish(Error("malformed", "the gateway sent " + what)); }
  void resend() { for (auto& each : episodes_) each.second.is_sent = false; }

  void join(const Json& header) {
    welcome = header;
    if (header["inference"].text != "remote") return finish(Error("no_remote_inference", "this gateway cannot infer"));
    const Json& spec = header["spec"];
    if (!observation_.read(spec["observation"])) return reject("a spec of observations: " + observation_.name);
    if (!action_.read(spec["action"])) return reject("a spec of actions: " + action_.name);
    num_choices_ = 0;
    for (auto& extra : spec["extras"].items)
      if (Form mask; extra["name"].text == "masks" && mask.read(extra["tensor"])) num_choices_ = mask.count;
    bool is_other = !run_id_.empty() && run_id_ != header["run_id"].text;  // it knows none of the episodes
    std::vector<int64_t> waiting;
    for (auto& [number, each] : episodes_)
      if (is_other) each.total = 0, each.waits ? waiting.push_back(number) : void();
    for (int64_t number : waiting) refuse(number, "unknown_episode", "");
    if (is_other) settings_version_ = 0;
    run_id_ = header["run_id"].text, heartbeat_s_ = std::max(0.1, header["heartbeat_s"].number);
    timeout_s_ = std::max(heartbeat_s_, header["timeout_s"].number);
    phase_ = Joined, has_rows_ = true, resend();
    if (header["settings_version"].number) apply(header["settings_version"].integer(), header["settings"]);
  }
  void apply(int64_t version, const Json& values) {
    if (version == settings_version_) return;
    settings_version_ = version, settings = values;
    if (options_.on_settings) options_.on_settings(settings);
  }
  /// A choice among numbers is the whole part of the policy's number.
  void cut(std::vector<double>& values) const {
    for (size_t i = 0; i < choices_.size() && i < values.size(); i++)
      if (choices_[i] > 0) values[i] = std::min(choices_[i] - 1, std::floor(values[i]));
  }
  /// Whether this step waits for its answer; else it came twice.
  bool awaits(int64_t number, const Json& step) const {
    auto at = episodes_.find(number);
    return at != episodes_.end() && at->second.waits && at->second.step == step.integer();
  }
  void take_action(const Json& header) {
    int64_t number = header["episode"].integer();
    const Json &action = header["action"], &reason = header["reason"];
    if (!awaits(number, header["step"])) return;
    if (!reason.text.empty()) return refuse(number, reason.text, header["detail"].text);
    Episode& each = episodes_[number];
    if (each.flags & 3) return release(number, false);
    std::vector<double> values;
    if (action.kind == Json::Number) values = {action.number};
    for (auto& item : action.items) values.push_back(item.number);
    if (values.size() != action_.count) return reject("an action of " + std::to_string(values.size()) + " numbers");
    cut(values);
    agents_[each.agent].action = {std::move(values), header["version"].integer(0)}, release(number, true);
  }
  void take_actions(const Json& header, const std::vector<std::string>& frames) {
    auto &numbers = header["episodes"].items, &steps = header["steps"].items;
    size_t size = action_.dtype->size * action_.count;
    if (numbers.size() != steps.size() || frames.size() < 2 || frames[1].size() != size * numbers.size())
      return reject("actions of other sizes");
    for (size_t row = 0; row < numbers.size(); row++) {
      int64_t number = numbers[row].integer();
      if (!awaits(number, steps[row])) continue;
      Action& action = agents_[episodes_[number].agent].action;
      action.values.resize(action_.count);
      for (size_t i = 0; i < action_.count; i++)
        action.values[i] = action_.dtype->get(&frames[1][row * size + i * action_.dtype->size]);
      cut(action.values), action.version = header["version"].integer(0), release(number, true);
    }
    for (auto& row : header["refused"].items)
      if (awaits(row["episode"].integer(), row["step"]))
        refuse(row["episode"].integer(), row["reason"].text, row["detail"].text);
    for (auto& number : header["ended"].items)
      if (episodes_.count(number.integer())) release(number.integer(), false);
  }

  /// Answer with the actions of the recorded episode.
  void replay() {
    if (phase_ != Joined) {
      std::ifstream file(options_.replay, std::ios::binary);
      std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
      if (!recorded_.parse(text) || recorded_["kind"].text != "episode" || recorded_["format"].number != 1 ||
          !action_.read(recorded_["spec"]["action"]))
        return finish(Error("no_episode", options_.replay + " is not of `shoal episodes RUN --export NAME`"));
      phase_ = Joined, apply(recorded_["settings_version"].integer(0), recorded_["settings"]);
    }
    for (auto& [number, each] : episodes_) {
      if (!each.waits) continue;
      int agent = each.agent;
      if (replaying_ < 0) replaying_ = agent;
      if (agent != replaying_) return finish(Error("no_episode", "it is of one agent", agent));
      const std::vector<Json>&rows = recorded_["observations"].items, &actions = recorded_["actions"].items;
      size_t step = size_t(each.step);
      bool is_same = step < rows.size() && rows[step].items.size() == each.observation.size();
      for (size_t i = 0; is_same && i < each.observation.size(); i++) {
        double expected = rows[step].items[i].number;
        is_same = std::abs(each.observation[i] - expected) <= 1e-5 * std::max(1.0, std::abs(expected));
      }
      if (!is_same && diverged_at < 0) diverged_at = each.step;
      if (each.flags & 3 || step >= actions.size()) return finish();
      std::vector<double> values;
      if (action_.is_scalar) values = {actions[step].number};
      for (auto& item : actions[step].items) values.push_back(item.number);
      if (values.size() != action_.count) return finish(Error("no_episode", "an action of another size", agent));
      cut(values), agents_[agent].action = {std::move(values), 0}, release(number, true);
    }
  }

  std::vector<std::string> addresses_;
  std::string token_, actor_id_, run_id_, why_;
  Options options_;
  int64_t incarnation_ = 0, next_episode_ = 0, settings_version_ = 0;
  std::unordered_map<int, Agent> agents_;
  std::map<int64_t, Episode> episodes_;  // the open ones, and those with an end that is unanswered, by number
  std::vector<double> choices_;  // of each number of an action that has both numbers (0) and choices
  std::vector<Error> errors_;
  Error fatal_;
  Json recorded_;       // of a replay
  int replaying_ = -1;  // the agent that plays it
  Phase phase_ = Away;
  Form observation_, action_;
  size_t address_ = 0, num_choices_ = 0;
  int waiting_ = 0, attempts_ = 0;
  bool has_greeted_ = false, has_rows_ = true, was_answered_ = false;
  double stepped_at_ = 0, since_ = 0, try_at_ = 0, deadline_ = 0, heard_at_ = 0, asked_at_ = 0, pinged_at_ = 0;
  double heartbeat_s_ = 1, timeout_s_ = 6;
};

}  // namespace shoal
