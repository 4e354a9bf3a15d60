// Keys that work everywhere on the page.

const FIELDS = "input:not([type=range]), select, textarea, summary, dialog";

export function bindKeys({ toggle, close, openHelp, changeTheme }) {
  // Space pauses also on a card, an event or a row: Enter opens those. On other buttons it presses the button.
  const pauses = (event) => event.key === " " && !event.target.closest(FIELDS) && (!event.target.closest("button") || event.target.closest(".opens"));
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return close();
    if (pauses(event)) {
      event.preventDefault();
      if (!event.repeat) toggle();
    } else if (!event.target.closest(FIELDS)) {
      if (event.key === "?") openHelp();
      else if (event.key === "t" || event.key === "T") changeTheme();
    }
  });
  // A button is pressed when Space is released.
  addEventListener("keyup", (event) => {
    if (pauses(event)) event.preventDefault();
  });
}
