// What is selected: a request or a worker, or nothing; and which request the keyboard is on.

export function createSelection() {
  const listeners = [];
  const selection = { current: null, hoveredKey: null };

  selection.onChange = (listener) => listeners.push(listener);
  const set = (value) => {
    selection.current = value;
    for (const listener of listeners) listener(value);
  };
  selection.openRequest = (key) => set({ kind: "request", key });
  selection.openWorker = (id) => set({ kind: "worker", id });
  selection.close = () => {
    if (selection.current) set(null);
  };
  selection.isRequest = (key) => selection.current?.kind === "request" && selection.current.key === key;
  selection.isWorker = (id) => selection.current?.kind === "worker" && selection.current.id === id;
  return selection;
}
