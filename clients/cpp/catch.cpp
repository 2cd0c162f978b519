// Catch: apples fall down a field of five columns and six rows, and a basket below moves left, stays, or moves right.
// An episode is five apples; each that is caught gives 1, each that is missed -1.
//
//     g++ -O2 -std=c++17 catch.cpp -o catch && SHOAL_TOKEN=... ./catch ws://127.0.0.1:8765 [games]
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "shoal.hpp"

struct Catch {
  int basket = 2, apples = 0, column = std::rand() % 5, row = 0;

  /// Basket, apple's column and row in [-1, 1], and how far the apple is to the right.
  std::vector<float> observe() const {
    return {basket / 2.f - 1, column / 2.f - 1, row / 2.5f - 1, (column - basket) / 4.f};
  }
  float step(int action) {
    basket = std::min(4, std::max(0, basket + action - 1));
    if (++row < 5) return 0;
    float reward = column == basket ? 1 : -1;
    apples++, column = std::rand() % 5, row = 0;
    return reward;
  }
  bool is_over() const { return apples == 5; }
};

void play(shoal::Run& run) {
  Catch game;
  for (float reward = 0; !run.is_over();) {
    reward = game.step(run.act(0, game.observe(), reward));
    if (!game.is_over()) continue;
    run.end(0, game.observe(), reward);
    game = Catch();
  }
}

/// Several games side by side: what they ask travels as one message, and so do the actions.
void play_many(shoal::Run& run, size_t count) {
  std::vector<Catch> games(count);
  for (size_t i = 0; i < count; i++) run.ask(int(i), games[i].observe());
  for (run.wait(); !run.is_over(); run.wait())
    for (size_t i = 0; i < count; i++) {
      float reward = games[i].step(run.action(int(i)));
      if (games[i].is_over()) run.end(int(i), games[i].observe(), reward), games[i] = Catch();
      run.ask(int(i), games[i].observe(), reward);
    }
}

int main(int argc, char** argv) {
  const char* token = std::getenv("SHOAL_TOKEN");
  if (argc < 2 || !token) {
    std::cerr << "usage: SHOAL_TOKEN=... catch ADDRESS[,ADDRESS] [GAMES]\n";
    return 2;
  }
  std::vector<std::string> addresses;
  std::istringstream listed(argv[1]);
  for (std::string each; std::getline(listed, each, ',');) addresses.push_back(each);
  try {
    shoal::Options options;
    options.offers = R"({"name": "catch", "observation": [4], "action": 3})";
    shoal::Run run(addresses, token, "catch-cpp", std::move(options));
    int count = argc > 2 ? std::atoi(argv[2]) : 1;
    count > 1 ? play_many(run, size_t(count)) : play(run);
    std::cout << "the run is over\n";
    return 0;
  } catch (const shoal::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
