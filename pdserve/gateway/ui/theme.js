// Dark and light themes: the system's choice, or the one made here, and the colours for the canvases.

const KEY = "pdserve.theme";
const NAMES = [
  "bg", "panel", "line", "text", "muted", "queue", "prefill", "transfer", "decode", "lost", "messages",
  "good", "bad", "reject", "focus", "met",
];

export const colours = {};

export function createTheme(button, onChange) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = stored();

  function apply() {
    const name = chosen ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = name;
    const other = name === "dark" ? "light" : "dark";
    button.setAttribute("aria-label", `Switch to the ${other} theme`);
    button.title = `Switch to the ${other} theme`;
    const style = getComputedStyle(document.documentElement);
    for (const key of NAMES) colours[key] = style.getPropertyValue(`--${key}`).trim();
    onChange();
  }

  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, chosen);
    } catch {
      // Storage is not allowed here, as for a file in some browsers; the choice lasts until the page is closed.
    }
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

function stored() {
  try {
    const value = localStorage.getItem(KEY);
    return value === "dark" || value === "light" ? value : null;
  } catch {
    return null;
  }
}
