// Answers for a person.

const SHOWN = 4; // numbers of a vector

/** One line, as the harness's tasks print it. */
export function line(answer) {
  const fixed = (values) => `[${values.slice(0, SHOWN).map((x) => x.toFixed(4)).join(" ")} ...]`;
  if (answer.embedding) return `${fixed(answer.embedding)} ${answer.embedding.length} numbers`;
  if (answer.hidden_states) {
    return `${fixed(answer.hidden_states[0])} ${answer.hidden_states.length} tokens x ${answer.hidden_states[0].length} numbers`;
  }
  if ("value" in answer) return `${answer.label} ${answer.value.toFixed(4)}`;
  const scores = Object.entries(answer.scores).sort(([, a], [, b]) => b - a);
  return scores.map(([label, score]) => `${label} ${score.toFixed(4)}`).join("\n");
}

/** Every number of an answer. */
export function numbers(answer) {
  if (typeof answer === "number") return [answer];
  return typeof answer === "object" ? Object.values(answer).flatMap(numbers) : [];
}
