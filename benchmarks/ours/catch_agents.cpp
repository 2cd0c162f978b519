// N agents of one game, Catch, in one `acts` message each round: a client of docs/protocol.md over plain sockets.
//   catch_agents AGENTS SECONDS ROUNDS PORT TOKEN
// ROUNDS: a second, as of a game with a clock, which catches up when it is late; 0: the next one begins at once.
// Prints one JSON object: steps a second, percentiles of the rounds in milliseconds, and the mean return.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

struct Socket {
  int fd = -1;
  std::string in;
  explicit Socket(int port) {
    fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    int one = 1;
    if (::connect(fd, (sockaddr*)&address, sizeof address)) throw std::runtime_error("cannot connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    write("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
          "Sec-WebSocket-Key: c2hvYWwtc2hvYWwtc2hvYQ==\r\nSec-WebSocket-Version: 13\r\n\r\n");
    size_t end;
    while ((end = in.find("\r\n\r\n")) == std::string::npos) fill(in.size() + 1);
    in.erase(0, end + 4);
  }
  void write(const std::string& data) {
    for (size_t at = 0; at < data.size();) {
      ssize_t sent = ::send(fd, data.data() + at, data.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) throw std::runtime_error("the connection is lost");
      at += sent;
    }
  }
  void fill(size_t size) {
    char buffer[65536];
    while (in.size() < size) {
      ssize_t read = ::recv(fd, buffer, sizeof buffer, 0);
      if (read <= 0) throw std::runtime_error("the connection is lost");
      in.append(buffer, read);
    }
  }
  void say(int opcode, std::string body) {
    std::string frame(1, char(0x80 | opcode));
    int bytes = body.size() < 126 ? 0 : body.size() < 65536 ? 2 : 8;
    frame += char(0x80 | (bytes == 0 ? int(body.size()) : bytes == 2 ? 126 : 127));
    for (int i = bytes - 1; i >= 0; i--) frame += char(body.size() >> (8 * i));
    const char mask[4] = {0x17, 0x2a, 0x53, 0x64};
    frame.append(mask, 4);
    for (size_t i = 0; i < body.size(); i++) body[i] ^= mask[i & 3];
    write(frame + body);
  }
  std::string hear() {
    for (;;) {
      fill(2);
      int opcode = in[0] & 15, bytes = (in[1] & 127) == 126 ? 2 : (in[1] & 127) == 127 ? 8 : 0;
      uint64_t size = in[1] & 127;
      fill(2 + bytes);
      if (bytes) size = 0;
      for (int i = 0; i < bytes; i++) size = size << 8 | uint8_t(in[2 + i]);
      fill(2 + bytes + size);
      std::string body = in.substr(2 + bytes, size);
      in.erase(0, 2 + bytes + size);
      if (opcode == 8) throw std::runtime_error("the gateway has closed: " + body.substr(2));
      if (opcode == 9) say(10, body);
      if (opcode == 1 || opcode == 2) return body;
    }
  }
};

struct Catch {
  int paddle = 2, fruits = 0, column = 0, row = 0;
  float seen[4];
  void drop() { column = rand() % 5, row = 0; }
  void see() {
    seen[0] = paddle / 2.f - 1, seen[1] = column / 2.f - 1, seen[2] = row / 2.5f - 1, seen[3] = (column - paddle) / 4.f;
  }
  void reset() { paddle = 2, fruits = 0, drop(), see(); }
  float step(int action) {
    float reward = 0;
    paddle = std::min(4, std::max(0, paddle + action - 1));
    if (++row == 5) reward = column == paddle ? 1.f : -1.f, fruits++, drop();
    see();
    return reward;
  }
};

template <class T>
std::string to_bytes(const std::vector<T>& values) {
  return std::string((const char*)values.data(), values.size() * sizeof(T));
}

std::string join(const std::vector<std::string>& frames) {
  std::string message;
  for (auto& frame : frames) {
    uint32_t size = frame.size();
    message.append((const char*)&size, 4).append(frame);
  }
  return message;
}

std::string list(const std::vector<long>& numbers) {
  std::string text = "[";
  for (long number : numbers) text += (text.size() > 1 ? "," : "") + std::to_string(number);
  return text + "]";
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int main(int, char** argv) {
  int agents = atoi(argv[1]);
  double seconds = atof(argv[2]), period = atof(argv[3]) > 0 ? 1 / atof(argv[3]) : 0;
  Socket socket(atoi(argv[4]));
  socket.say(1, std::string("{\"kind\":\"hello\",\"protocol\":1,\"actor_id\":\"game\",\"incarnation\":1,") +
                    "\"inference\":\"remote\",\"token\":\"" + argv[5] + "\"}");
  if (socket.hear().find("\"welcome\"") == std::string::npos) throw std::runtime_error("no welcome");
  std::vector<Catch> games(agents);
  std::vector<long> episode(agents), step(agents, -1);  // -1: it begins
  std::vector<int> action(agents), order;
  std::vector<double> rounds;
  std::vector<float> observations, rewards, returns(agents);
  std::vector<uint8_t> flags;
  std::vector<long> episodes, steps;
  long next = 0, taken = 0, finished = 0, round = 0;
  double total = 0, begin = now(), warm = begin + std::min(2.0, seconds / 4);
  auto add = [&](int agent, float reward, int flag) {
    episodes.push_back(episode[agent]), steps.push_back(step[agent]), rewards.push_back(reward), flags.push_back(flag);
    observations.insert(observations.end(), games[agent].seen, games[agent].seen + 4);
    if (!flag) order.push_back(agent);
  };
  while (now() < begin + seconds) {
    double early = begin + period * round++ - now();
    if (early > 0) std::this_thread::sleep_for(std::chrono::duration<double>(early));
    episodes.clear(), steps.clear(), observations.clear(), rewards.clear(), flags.clear(), order.clear();
    for (int agent = 0; agent < agents; agent++) {
      if (step[agent] >= 0) {
        float reward = games[agent].step(action[agent]);
        bool is_last = games[agent].fruits == 5;
        returns[agent] += reward, step[agent]++, taken += now() > warm;
        add(agent, reward, is_last);
        if (!is_last) continue;
        total += returns[agent], finished++;
      }
      games[agent].reset(), episode[agent] = next++, step[agent] = 0, returns[agent] = 0;
      add(agent, 0, 0);
    }
    double sent = now();
    std::string header = "{\"kind\":\"acts\",\"episodes\":" + list(episodes) + ",\"steps\":" + list(steps) + "}";
    socket.say(2, join({header, to_bytes(observations), to_bytes(rewards), to_bytes(flags)}));
    std::string answer = socket.hear();
    if (sent > warm) rounds.push_back(now() - sent);
    uint32_t size;
    memcpy(&size, answer.data(), 4);
    std::string said = answer.substr(4, size);
    const char* chosen = answer.data() + 4 + size + 4;
    if (said.find("\"refused\":[]") == std::string::npos || answer.size() != 8 + size + 8 * order.size())
      throw std::runtime_error(said);
    for (size_t i = 0; i < order.size(); i++) memcpy(&action[order[i]], chosen + 8 * i, 4);
  }
  double took = now() - warm;
  std::sort(rounds.begin(), rounds.end());
  auto at = [&](double share) { return 1e3 * rounds[size_t(share * (rounds.size() - 1))]; };
  printf("{\"steps_s\": %.0f, \"p50_ms\": %.3f, \"p99_ms\": %.3f, \"episodes\": %ld, \"mean_return\": %.2f}\n",
         taken / took, at(0.5), at(0.99), finished, total / std::max(1L, finished));
  socket.say(2, join({"{\"kind\":\"bye\"}"}));
  socket.say(8, std::string("\x03\xe8", 2));
}
