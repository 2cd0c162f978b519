// A policy of Shoal in C#, for Unity (.NET Standard 2.0) and .NET: one file, no package. Apache License 2.0.
//
//   var policy = new Shoal.Policy(text);           // the content of policy.json
//   policy.Reset();                                // where an episode begins
//   float[] action = policy.Act(observation);      // in C order: (int)action[0] of a Discrete
using System;
using System.Collections.Generic;
using System.Globalization;
using System.Linq;

namespace Shoal {
  public sealed class Policy {
    public bool Sampled;        // or the best action is taken
    public Func<double> Random; // a number from 0 on, below 1
    public float[] State, Outputs; // Outputs: at the newest observation
    readonly string kind;
    readonly int observationSize, maskSize;
    readonly float[] low, high, sizes;
    readonly List<Layer> layers = new List<Layer>();
    sealed class Layer { public string Kind, Activation; public float[] Weight, Bias, WeightH, BiasH; }

    public Policy(string json) {
      string unsupported = Find(json, "format") == "1" ? Find(json, "unsupported") : "its format is not 1";
      if (unsupported != "") throw new NotSupportedException("policy.json: " + unsupported + ": run policy.onnx");
      kind = Find(json, "kind");
      Sampled = Find(json, "action") == "sampled";
      observationSize = int.Parse(Find(json, "observation_size"));
      maskSize = int.Parse(Find(json, "mask_size"));
      State = new float[int.Parse(Find(json, "state_size"))];
      low = ReadList(Find(json, "action_low"));
      high = ReadList(Find(json, "action_high"));
      sizes = ReadList(Find(json, "action_sizes"));
      for (int at = 0; (at = json.IndexOf("\"layer\":", at, StringComparison.Ordinal)) >= 0; at++)
        layers.Add(new Layer {
          Kind = Find(json, "layer", at), Activation = Find(json, "activation", at),
          Weight = ReadTensor(Find(json, "weight", at)), Bias = ReadTensor(Find(json, "bias", at)),
          WeightH = ReadTensor(Find(json, "weight_h", at)), BiasH = ReadTensor(Find(json, "bias_h", at)),
        });
      Random = new Random().NextDouble;
    }
    /// <summary>The same policy for another agent, which has its own state.</summary>
    public Policy Copy() {
      var other = (Policy)MemberwiseClone();
      other.Reset();
      return other;
    }
    /// <summary>The next observation begins an episode.</summary>
    public void Reset() { State = new float[State.Length]; }
    /// <summary>The action at an observation, which is flat. mask: of each choice whether it is allowed.</summary>
    public float[] Act(float[] observation, bool[] mask = null) {
      int given = mask == null ? 0 : mask.Length, begin = 0;
      if (observation.Length != observationSize || given != maskSize)
        throw new ArgumentException("observation and mask: " + observation.Length + " and " + given +
          " numbers, expected " + observationSize + " and " + maskSize);
      Outputs = observation;
      foreach (Layer each in layers) Compute(each);
      for (int i = 0; i < given; i++) if (!mask[i]) Outputs[i] = -1e9f;
      var action = new List<float>();
      foreach (int size in sizes) {
        int best = 0; // Gumbel's noise makes the largest one a sample
        double highest = double.NegativeInfinity;
        for (int i = 0; i < size; i++) {
          double score = Outputs[begin + i];
          if (Sampled && kind != "epsilon_greedy") score -= Math.Log(1e-30 - Math.Log(Random()));
          if (score > highest) { highest = score; best = i; }
        }
        if (!(highest > -5e8)) throw new ArgumentException("the mask allows no choice, or a number is NaN");
        action.Add(best);
        begin += size;
      }
      for (int i = 0; i < low.Length; i++) { // between low and high, by tanh
        float logStd = Outputs[low.Length + i] = Math.Min(2f, Math.Max(-20f, Outputs[low.Length + i]));
        double radius = Sampled ? Math.Exp(logStd) * Math.Sqrt(-2 * Math.Log(1 - Random())) : 0;
        double u = Outputs[i] + (Sampled ? radius * Math.Cos(2 * Math.PI * Random()) : 0);
        double y = (low[i] + high[i]) / 2 + (high[i] - low[i]) / 2 * Math.Tanh(u);
        action.Add(Math.Min(high[i], Math.Max(low[i], (float)y)));
      }
      return action.ToArray();
    }
    void Compute(Layer layer) {
      float[] x = Multiply(layer.Weight, layer.Bias, Outputs), h = Multiply(layer.WeightH, layer.BiasH, State);
      int n = layer.Kind == "linear" ? 0 : x.Length / (layer.Kind == "gru" ? 3 : 4);
      for (int i = 0; i < n; i++) { // the gates are in torch's order
        float first = Sigmoid(x[i] + h[i]), second = Sigmoid(x[n + i] + h[n + i]);
        float next = (float)Math.Tanh(x[2 * n + i] + (layer.Kind == "gru" ? first : 1) * h[2 * n + i]);
        if (layer.Kind == "gru") State[i] = next + second * (State[i] - next);
        else {
          State[n + i] = second * State[n + i] + first * next;
          State[i] = Sigmoid(x[3 * n + i] + h[3 * n + i]) * (float)Math.Tanh(State[n + i]);
        }
      }
      Outputs = n > 0 ? State.Take(n).ToArray() : x;
      for (int i = 0; i < Outputs.Length && layer.Activation != ""; i++)
        Outputs[i] = layer.Activation == "tanh" ? (float)Math.Tanh(Outputs[i]) : Math.Max(0f, Outputs[i]);
    }
    static float Sigmoid(float x) { return 0.5f + 0.5f * (float)Math.Tanh(0.5 * x); }
    static float[] Multiply(float[] weight, float[] bias, float[] x) {
      var y = (float[])bias.Clone();
      for (int i = 0, at = 0; at < weight.Length; i++) for (int j = 0; j < y.Length; j++) y[j] += weight[at++] * x[i];
      return y;
    }
    static string Find(string json, string key, int from = 0) { // keys are unique
      int at = json.IndexOf("\"" + key + "\":", from, StringComparison.Ordinal) + key.Length + 3;
      while (char.IsWhiteSpace(json[at])) at++;
      string ends = json[at] == '"' ? "\"" : json[at] == '[' ? "]" : ",}";
      if (ends != ",}") at++;
      return json.Substring(at, json.IndexOfAny(ends.ToCharArray(), at) - at);
    }
    static float[] ReadList(string text) {
      var numbers = text.Split(',').Where(each => each.Trim() != "");
      return numbers.Select(each => float.Parse(each, CultureInfo.InvariantCulture)).ToArray();
    }
    static float[] ReadTensor(string base64) {
      byte[] bytes = Convert.FromBase64String(base64);
      var values = new float[bytes.Length / 4];
      Buffer.BlockCopy(bytes, 0, values, 0, bytes.Length);
      return values;
    }
  }
}
